"""Attention of a fast step on a CPU, compiled: each row is read once, packed or where it lies in its page."""

import numpy as np
import torch

from sfi_kernels.compiled import by_heads
from sfi_kernels.loops import attention
from sfi_kernels.loops.vectors import F
from sfi_kernels.numpy_views import KINDS, NO_PAGES, NUMBER, check_readable, pages_of, plain
from sfi_kernels.pseudo_token import PseudoToken

NONE = torch.empty(0, 0), torch.empty(0, 0, 0)


def sparse_attention(
    query_BHGD: torch.Tensor, packed_key_BHSD: torch.Tensor, packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, recent_start_B: torch.Tensor, length_B: torch.Tensor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None, pseudo: PseudoToken | None = None,
    position_BHS: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `reference.sparse_attention`. Sums are of float32."""
    B, H, G, _ = query_BHGD.shape
    segment, S = NO_PAGES, 0
    if position_BHS is None:
        check_readable(packed_key_BHSD, packed_value_BHSE)
        segment, S = pages_of(packed_key_BHSD, packed_value_BHSE), packed_key_BHSD.shape[2]
        position_BHS = packed_length_BH.new_empty(B, H, 0)
    check_readable(key_PHND, value_PHNE)
    sink = plain(NONE[0] if sink_HG is None else sink_HG)
    extra = (NONE[1], NONE[1]) if pseudo is None else pseudo
    out_BHGE = torch.empty(B, H, G, value_PHNE.shape[3])
    rows = position_BHS, packed_length_BH, block_table_BP, recent_start_B, length_B
    arguments = (
        plain(query_BHGD)[:, :, None], pages_of(key_PHND, value_PHNE), segment, KINDS[key_PHND.dtype],
        key_PHND.shape[2], S, *(part.numpy() for part in rows), F(scale), F(soft_cap or 0), sink, *map(plain, extra),
        out_BHGE[:, :, None].numpy(), np.empty((0, 0, 0, 0), F),
    )  # fmt: skip
    work = NUMBER * query_BHGD.numel() * max(S, position_BHS.shape[2])  # and recent tokens, which are fewer
    by_heads(lambda begin, end: attention.attend(begin, end, *arguments), H, work)
    return out_BHGE.to(query_BHGD.dtype)
