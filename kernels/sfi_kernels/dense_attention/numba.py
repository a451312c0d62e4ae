"""Dense attention of a few queries on a CPU, compiled: keys and values are read once, where they lie."""

import numpy as np
import torch

from sfi_kernels.compiled import by_heads
from sfi_kernels.dense_attention.reference import check
from sfi_kernels.loops import attention
from sfi_kernels.loops.vectors import F
from sfi_kernels.numpy_views import KINDS, NO_PAGES, NUMBER, check_readable, pages_of, plain


def dense_attention(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    length_B: torch.Tensor, *, scale: float, soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `reference.dense_attention`. Sums are of float32; time is in proportion to the queries."""
    logits_BHGT = torch.empty(0, 0, 0, 0)
    return _attend(query_BHGWD, key_PHND, value_PHNE, block_table_BP, length_B, scale, soft_cap, sink_HG, logits_BHGT)


def dense_attention_with_logits(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    length_B: torch.Tensor, *, scale: float, soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
    native: bool = False,  # noqa: ARG001 - nothing is rounded
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `with_logits.dense_attention_with_logits`."""
    logits_BHGT = torch.full((*query_BHGWD.shape[:3], int(length_B.max())), -torch.inf)
    out = _attend(query_BHGWD, key_PHND, value_PHNE, block_table_BP, length_B, scale, soft_cap, sink_HG, logits_BHGT)
    return out, logits_BHGT[:, :, :, None]


def _attend(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    length_B: torch.Tensor, scale: float, soft_cap: float | None, sink_HG: torch.Tensor | None,
    logits_BHGT: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    check(query_BHGWD, key_PHND, block_table_BP, length_B, value_PHNE, sink_HG)
    check_readable(key_PHND, value_PHNE)
    query_BHWGD = query_BHGWD.transpose(2, 3)
    B, H, W, G, _ = query_BHWGD.shape
    out_BHWGE = torch.empty(B, H, W, G, value_PHNE.shape[3])
    nothing_BH, nothing_BHX = length_B.new_zeros(B, H), length_B.new_empty(B, H, 0)
    rows = nothing_BHX, nothing_BH, block_table_BP, torch.zeros_like(length_B), length_B
    arguments = (
        plain(query_BHWGD), pages_of(key_PHND, value_PHNE), NO_PAGES, KINDS[key_PHND.dtype], key_PHND.shape[2], 0,
        *(part.numpy() for part in rows), F(scale), F(soft_cap or 0),
        np.empty((0, 0), F) if sink_HG is None else plain(sink_HG), *[np.empty((0, 0, 0), F)] * 2,
        out_BHWGE.numpy(), logits_BHGT.numpy(),
    )  # fmt: skip
    work = NUMBER * query_BHGWD.numel() * int(length_B.max())
    by_heads(lambda begin, end: attention.attend(begin, end, *arguments), H, work)
    return out_BHWGE.transpose(2, 3).to(query_BHGWD.dtype)
