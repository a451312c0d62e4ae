"""Attention of a fast step on a CPU, compiled: each row is read once, where it lies in its page."""

import torch

from sfi_kernels.compiled import by_heads
from sfi_kernels.loops import attention
from sfi_kernels.loops.vectors import F
from sfi_kernels.numpy_views import KINDS, plain, readable, rows_of
from sfi_kernels.pseudo_token import PseudoToken

NUMBER = 3e-4  # microseconds of a query's number and row, on a Zen 4
NONE = torch.empty(0, 0), torch.empty(0, 0, 0)


def sparse_attention(
    query_BHGD: torch.Tensor, packed_key_BHSD: torch.Tensor,  # noqa: ARG001 - one signature for all backends
    packed_value_BHSE: torch.Tensor,  # noqa: ARG001
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, recent_start_B: torch.Tensor, length_B: torch.Tensor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None, pseudo: PseudoToken | None = None,
    position_BHS: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `reference.sparse_attention`. Sums are of float32."""
    if position_BHS is None:
        raise ValueError("position must be given to numba, which reads no packed rows")
    if not readable(key_PHND, value_PHNE):
        raise ValueError("pages must be contiguous, on the CPU, and float32, bfloat16 or float16")
    B, H, G, _ = query_BHGD.shape
    sink = plain(NONE[0] if sink_HG is None else sink_HG)
    extra = (NONE[1], NONE[1]) if pseudo is None else pseudo
    out_BHGE = torch.zeros(B, H, G, value_PHNE.shape[3])
    (key_XD, half_key_XD), (value_XE, half_value_XE) = map(rows_of, (key_PHND, value_PHNE))
    kind, page_size = KINDS[key_PHND.dtype], key_PHND.shape[2]
    rows = position_BHS, packed_length_BH, block_table_BP, recent_start_B, length_B
    options = F(scale), F(soft_cap or 0), sink, *map(plain, extra)
    arguments = (
        plain(query_BHGD), key_XD, value_XE, half_key_XD, half_value_XE, kind, page_size,
        *(part.numpy() for part in rows), *options, out_BHGE.numpy(),
    )  # fmt: skip
    work = NUMBER * query_BHGD.numel() * position_BHS.shape[2]  # and recent tokens, which are fewer
    by_heads(lambda begin, end: attention.attend(begin, end, *arguments), H, work)
    return out_BHGE.to(query_BHGD.dtype)
