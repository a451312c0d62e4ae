"""The last keys and values of a layer that attends to a sliding window or in chunks, in a ring of pages a request.

Position p of a request lies in row p mod R of its ring. The block table lists the ring's pages twice, so that the rows
that a query reads have ascending places, wherever the ring ends: a request's last token is at place (length - 1) mod R
+ R. So the table never changes, whatever the run's length; and rejected drafts are overwritten where they lie.
"""

from collections.abc import Sequence

import torch

from sfi_core.state.layer_pages import LayerPages
from sfi_kernels.pack import append
from sfi_kernels.step_descriptor import UNIT, sent


def ring_rows(window: int, tokens: int, capacity: int) -> int:
    """Return the rows of a ring for the `tokens` of a pass, the first of which sees `window` tokens, its own included.

    A request has at most `capacity` tokens.
    """
    return -(-min(window - 1 + tokens, capacity) // UNIT) * UNIT


class WindowRing:
    """A layer's rings: `rows`, R, of each request, in the `pages` that `table_BP` lists twice, int32."""

    def __init__(self, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, rows: int, backend: str) -> None:
        """Allocate rings of `rows`, a multiple of 64, for keys and values such as these: one page each under torch."""
        batch, device = len(key_BHTD), key_BHTD.device
        size = UNIT if backend == "triton" else rows
        self.rows, self.backend = rows, backend
        self.pages = LayerPages.empty(key_BHTD, value_BHTE, batch * rows // size, size)
        for tensor in self.pages.tensors:  # a draft's padding reads rows that nobody has written
            tensor.zero_()
        table_BP = torch.arange(batch * rows // size, dtype=torch.int32, device=device).view(batch, -1)
        self.table_BP = torch.cat([table_BP, table_BP], 1)

    def end(self, length_B: torch.Tensor) -> torch.Tensor:
        """Return the place behind each request's last token."""
        return (length_B - 1) % self.rows + (self.rows + 1)

    def append(
        self, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, place_B: torch.Tensor, count_B: torch.Tensor
    ) -> None:
        """Write each request's last `count` of T tokens from a place on, as `sfi_kernels.pack.append`."""
        append.on(self.backend)(key_BHTD, value_BHTE, place_B, count_B, *self.pages.tensors, self.table_BP)

    def fill(
        self, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, lengths: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Write each request's last `counts` of T tokens, which are its last of `lengths`."""
        length_B, count_B = sent(torch.tensor([lengths, counts], dtype=torch.int32), key_BHTD.device)
        self.append(key_BHTD, value_BHTE, self.end(length_B) - count_B, count_B)

    def tokens(self, lengths: Sequence[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy each request's last `count` keys and values, [B, H, T, X]; of a shorter one, anything before its own."""
        table_BP = self.table_BP
        length_B = sent(torch.tensor(lengths), table_BP.device)
        row_BT = (length_B[:, None] - torch.arange(count, 0, -1, device=table_BP.device)) % self.rows
        size = self.pages.key_PHND.shape[2]
        page_BT, place_BT = table_BP.gather(1, row_BT // size).long(), row_BT % size
        key, value = (x[page_BT, :, place_BT].transpose(1, 2) for x in self.pages.tensors[:2])
        return key.contiguous(), value.contiguous()
