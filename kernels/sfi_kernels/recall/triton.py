"""Recall in Triton: one launch for all requests; programs read host pages over the link."""

import torch
import triton
import triton.language as tl

from sfi_kernels.attention_tile.triton import row_start
from sfi_kernels.launch import launch
from sfi_kernels.pack.reference import check_heads
from sfi_kernels.pack.triton import BLOCK_S, WIDE_BYTES, slot_position
from sfi_kernels.pages import row_constants
from sfi_kernels.recall.reference import check

# of a thread: left alone, the compiler spills narrow rows for more programs
NARROW_BYTES, NARROW_REGISTERS = 128, 80


@triton.jit
def _old_place(position_ptr, position, length, steps):
    """Return how many old positions are smaller, by binary search, and whether the next one is equal."""
    place = tl.zeros_like(position)
    for step in range(steps):
        candidate = place + (1 << (steps - 1 - step))
        inside = candidate <= length
        probe = tl.load(position_ptr + candidate - 1, mask=inside, other=0)
        place = tl.where(inside & (probe < position), candidate, place)
    inside = (position >= 0) & (place < length)
    found = tl.load(position_ptr + place, mask=inside, other=-1)
    return place, inside & (found == position)


@triton.jit
def _copy_rows(
    host_ptr, old_ptr, into_ptr, host_row, old_row, into_row, packed, on_device,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows from the host, given by their first number, or from the old segment."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    from_host, from_old = (packed & ~on_device)[:, None], (packed & on_device)[:, None]
    fetched = tl.load(host_ptr + host_row[:, None] + column, mask=from_host & inside, other=0.0)
    kept = tl.load(old_ptr + old_row[:, None] * WIDTH + column, mask=from_old & inside, other=0.0)
    rows = tl.where(from_old, kept, fetched)
    tl.store(into_ptr + into_row[:, None] * WIDTH + column, rows, mask=packed[:, None] & inside)


@triton.jit(do_not_specialize=["K", "S", "N", "pages", "steps"])
def _recall_kernel(
    block_table_ptr, key_pages_ptr, value_pages_ptr, request_ptr, index_ptr, sink_ptr,
    key_ptr, value_ptr, position_ptr, length_ptr,
    into_key_ptr, into_value_ptr, into_position_ptr, into_length_ptr, fetched_ptr, heads_ptr,
    H, K, S, N, pages, steps,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    refreshed, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    request = tl.load(request_ptr + refreshed).to(tl.int64)
    if request < 0:
        return
    segment, pair = request * H + head, refreshed * H + head
    slot = tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)  # [BLOCK_S]
    position_ptr += segment * S
    old_length = tl.load(length_ptr + segment)
    sink = tl.load(sink_ptr + refreshed)

    index_ptr += pair * K
    position = slot_position(index_ptr, slot, sink, K, S)
    following = slot_position(index_ptr, slot + 1, sink, K, S)
    place, on_device = _old_place(position_ptr, position, old_length, steps)
    if HEADS:  # noqa: SIM102 - known before the kernel is compiled
        if tl.load(heads_ptr + pair) == 0:
            counts = slot < tl.minimum(old_length, S)
            position = tl.load(position_ptr + slot, mask=counts, other=-1)
            following = tl.where(slot + 1 < old_length, 0, -1)
            place, on_device = slot, counts
    packed = position >= 0
    tl.store(into_position_ptr + pair * S + slot, position, mask=slot < S)
    # the length is one more than the last packed slot, or 0: one slot of one program knows it
    tl.store(
        into_length_ptr + pair + tl.zeros_like(slot),
        tl.where(packed, slot + 1, 0),
        mask=(packed & (following < 0)) | ((slot == 0) & ~packed),
    )
    missing = tl.sum((packed & ~on_device).to(tl.int32))
    tl.atomic_add(fetched_ptr + pair, missing, mask=missing > 0, sem="relaxed")

    token = tl.maximum(position, 0)
    table = block_table_ptr + request * pages
    page = tl.load(table + token // N, mask=packed & ~on_device, other=0)
    offset = token % N
    old, into = segment * S + place, pair * S + slot
    host_key = row_start(page, head, offset, KEY_STRIDES)
    host_value = row_start(page, head, offset, VALUE_STRIDES)
    _copy_rows(key_pages_ptr, key_ptr, into_key_ptr, host_key, old, into, packed, on_device, D, BLOCK_D)
    _copy_rows(value_pages_ptr, value_ptr, into_value_ptr, host_value, old, into, packed, on_device, E, BLOCK_E)


def recall(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    request_R: torch.Tensor, index_RHK: torch.Tensor, sink_R: torch.Tensor, key_BHSD: torch.Tensor,
    value_BHSE: torch.Tensor, position_BHS: torch.Tensor, length_BH: torch.Tensor,
    into_key_RHSD: torch.Tensor, into_value_RHSE: torch.Tensor, into_position_RHS: torch.Tensor,
    into_length_RH: torch.Tensor, fetched_RH: torch.Tensor, *, heads_RH: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """See `reference.recall`. D and E up to 256; host pages must not change until the kernel has run."""
    old = key_BHSD, value_BHSE, position_BHS, length_BH
    into = into_key_RHSD, into_value_RHSE, into_position_RHS, into_length_RH
    check(key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R, old, into, fetched_RH)
    if heads_RH is not None:
        check_heads(heads_RH, index_RHK)
    (R, H, K), (S, N) = index_RHK.shape, (key_BHSD.shape[2], key_PHND.shape[2])
    constants = row_constants(key_PHND, value_PHNE)
    row_bytes = max(constants["D"], constants["E"]) * key_BHSD.element_size()
    fetched_RH.zero_()  # the programs of a head add to one count
    # an empty segment still has a length to write
    grid = (R, H, max(1, triton.cdiv(S, BLOCK_S)))
    launch(
        # the block table comes first: the first tensor's device is where the kernel runs
        _recall_kernel, grid, block_table_BP, key_PHND, value_PHNE, request_R, index_RHK, sink_R,
        *old, *into, fetched_RH, length_BH if heads_RH is None else heads_RH,
        H, K, S, N, block_table_BP.shape[1], S.bit_length(),
        num_warps=8 if row_bytes > WIDE_BYTES else 4,
        max_registers=NARROW_REGISTERS if row_bytes <= NARROW_BYTES else None,
        BLOCK_S=BLOCK_S, HEADS=heads_RH is not None, **constants,
    )  # fmt: skip
