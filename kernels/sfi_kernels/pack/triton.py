"""Packing in Triton: one launch for the keys, values and positions of every refreshed request."""

import torch
import triton
import triton.language as tl

from sfi_kernels.attention_tile.triton import row_start
from sfi_kernels.launch import launch
from sfi_kernels.pack.reference import check, check_heads
from sfi_kernels.pages import row_constants

BLOCK_S = 64
# wider rows are copied by twice the warps, to keep a tile in registers
WIDE_BYTES = 256


@triton.jit
def slot_position(index_ptr, slot, sink, K, S):
    """Return the positions of slots: the sinks, then the selected tokens, then -1."""
    rank = slot - sink
    selected = tl.load(index_ptr + rank, mask=(rank >= 0) & (rank < K), other=-1)
    return tl.where(slot < S, tl.where(rank < 0, slot, selected), -1)


@triton.jit
def _copy_rows(pages_ptr, packed_ptr, source, target, packed, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    mask = packed[:, None] & (column < WIDTH)
    rows = tl.load(pages_ptr + source[:, None] + column, mask=mask, other=0.0)
    tl.store(packed_ptr + target[:, None] * WIDTH + column, rows, mask=mask)  # [BLOCK_S, BLOCK]


@triton.jit(do_not_specialize=["K", "S", "N", "pages"])
def _pack_kernel(
    key_pages_ptr, value_pages_ptr, block_table_ptr, request_ptr, index_ptr, sink_ptr,
    key_ptr, value_ptr, position_ptr, length_ptr, heads_ptr, H, K, S, N, pages,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    refreshed, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(request_ptr + refreshed).to(tl.int64)
    if request < 0:
        return
    if HEADS:  # noqa: SIM102 - known before the kernel is compiled
        if tl.load(heads_ptr + refreshed * H + head) == 0:
            return
    sink = tl.load(sink_ptr + refreshed)
    index_ptr += (refreshed * H + head) * K
    slot = tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)  # [BLOCK_S]
    position = slot_position(index_ptr, slot, sink, K, S)

    segment = request * H + head
    tl.store(position_ptr + segment * S + slot, position, mask=slot < S)
    # the length is one more than the last packed slot, or 0: one slot of one program knows it
    packed, following = position >= 0, slot_position(index_ptr, slot + 1, sink, K, S)
    tl.store(
        length_ptr + segment + tl.zeros_like(slot),
        tl.where(packed, slot + 1, 0),
        mask=(packed & (following < 0)) | ((slot == 0) & ~packed),
    )

    token = tl.maximum(position, 0)
    page = tl.load(block_table_ptr + request * pages + token // N, mask=packed, other=0)
    target = segment * S + slot
    source = row_start(page, head, token % N, KEY_STRIDES)
    _copy_rows(key_pages_ptr, key_ptr, source, target, packed, D, BLOCK_D)
    source = row_start(page, head, token % N, VALUE_STRIDES)
    _copy_rows(value_pages_ptr, value_ptr, source, target, packed, E, BLOCK_E)


def pack(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    request_R: torch.Tensor, index_RHK: torch.Tensor, sink_R: torch.Tensor, key_BHSD: torch.Tensor,
    value_BHSE: torch.Tensor, position_BHS: torch.Tensor, length_BH: torch.Tensor, *,
    heads_RH: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """See `reference.pack`. D and E up to 256."""
    tensors = (
        key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R,
        key_BHSD, value_BHSE, position_BHS, length_BH,
    )  # fmt: skip
    check(*tensors)
    if heads_RH is not None:
        check_heads(heads_RH, index_RHK)
    (R, H, K), (S, N) = index_RHK.shape, (key_BHSD.shape[2], key_PHND.shape[2])
    constants = row_constants(key_PHND, value_PHNE)
    row_bytes = max(constants["D"], constants["E"]) * key_BHSD.element_size()
    # an empty segment still has a length to write
    grid = (R, H, max(1, triton.cdiv(S, BLOCK_S)))
    launch(
        _pack_kernel, grid, *tensors, length_BH if heads_RH is None else heads_RH,
        H, K, S, N, block_table_BP.shape[1],
        num_warps=8 if row_bytes > WIDE_BYTES else 4,
        BLOCK_S=BLOCK_S, HEADS=heads_RH is not None, **constants,
    )  # fmt: skip
