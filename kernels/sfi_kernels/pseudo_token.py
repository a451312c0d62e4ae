"""A pseudo token: one more term of a softmax, with its own logit and value, for keys that are not read."""

from typing import NamedTuple

import torch

from sfi_kernels.shapes import check_shape


class PseudoToken(NamedTuple):
    """What stands for the unread keys of a step.

    Attributes:
        logit_BHG: Its logit for each query, after scale and soft cap, float32; -inf where there is none.
        value_BHE: Its value by KV head, float32; finite for a fast request, anything for another.
    """

    logit_BHG: torch.Tensor
    value_BHE: torch.Tensor

    def part(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return it as `partial_attention` returns a segment: its output and the log-sum-exp."""
        B, H, G = self.logit_BHG.shape
        value_BHG1E = self.value_BHE[:, :, None, None].expand(B, H, G, 1, -1)
        return value_BHG1E, self.logit_BHG[..., None]

    def of(self, rows: slice) -> "PseudoToken":
        """Return those of some requests."""
        return PseudoToken(self.logit_BHG[rows], self.value_BHE[rows])

    def check(self, query_BHGD: torch.Tensor, width: int) -> None:
        """Refuse one that does not fit the queries and the values' width.

        Raises:
            ValueError: With the tensor's name.
        """
        B, H, G, _ = query_BHGD.shape
        check_shape(self.logit_BHG, "pseudo logit", B=B, H=H, G=G)
        check_shape(self.value_BHE, "pseudo value", B=B, H=H, E=width)
