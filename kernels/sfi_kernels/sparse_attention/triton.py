"""Two-segment attention in Triton: `decode_attention` with every request fast."""

import torch

from sfi_kernels.decode_attention import resident_programs
from sfi_kernels.decode_attention.triton import decode_attention
from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.shapes import check_int32, check_shape
from sfi_kernels.split_plan import work_items
from sfi_kernels.split_plan.triton import split_plan
from sfi_kernels.step_descriptor import FAST, uniform_step


def sparse_attention(
    query_BHGD: torch.Tensor, packed_key_BHSD: torch.Tensor, packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, recent_start_B: torch.Tensor, length_B: torch.Tensor, *,
    scale: float, soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
    pseudo: PseudoToken | None = None, position_BHS: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `reference.sparse_attention`. Heads of at most 256 numbers, pages of multiples of 16 tokens."""
    B, H, *_ = query_BHGD.shape
    device = query_BHGD.device
    check_shape(length_B, "length", B=B)
    check_shape(recent_start_B, "recent_start", B=B)
    check_int32(device, length=length_B, recent_start=recent_start_B)
    items = work_items(B, H, resident_programs(device))
    most = (packed_key_BHSD if position_BHS is None else position_BHS).shape[2]
    step = uniform_step(FAST, length_B, recent_start_B, most, items)
    split_plan(step, H, resident_programs(device))
    return decode_attention(
        query_BHGD[:, :, :, None], packed_key_BHSD, packed_value_BHSE, packed_length_BH, key_PHND,
        value_PHNE, block_table_BP, step, scale=scale, soft_cap=soft_cap, sink_HG=sink_HG, pseudo=pseudo,
        position_BHS=position_BHS,
    ).out_BHGWE[:, :, :, 0]  # fmt: skip
