"""Appending, packing and recall in Triton: one launch each for the keys, values and norms or positions of all requests.

Pages in host memory are written and read over the link.
"""

import torch
import triton
import triton.language as tl

from sfi_kernels.attention_tile.triton import row_start
from sfi_kernels.chained_triton import await_previous
from sfi_kernels.launch import launch
from sfi_kernels.pack.reference import check, check_append, check_recall, ring_room
from sfi_kernels.pages import Ring, ring_operands, row_constants

BLOCK_S, BLOCK_T = 64, 32
WIDE_BYTES = 256  # wider rows are copied by twice the warps, to keep a tile in registers
# of a thread of a recall: left alone, the compiler spills narrow rows for more programs
NARROW_BYTES, NARROW_REGISTERS = 128, 80


@triton.jit
def _move_rows(source_ptr, target_ptr, source, target, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows, given by their first numbers, and return them, [rows, BLOCK]."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = valid[:, None] & (column < WIDTH)
    rows = tl.load(source_ptr + source[:, None] + column, mask=mask, other=0.0)
    tl.store(target_ptr + target[:, None] + column, rows, mask=mask)
    return rows


@triton.jit
def append_rows(
    key_ptr, value_ptr, key_pages_ptr, value_pages_ptr, norm_ptr, page, place, head, token, valid, H, N,
    key_token_stride, value_token_stride, KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write some `token`s of a head to their places in the pages, with norms; return the keys, float32."""
    target = row_start(page, head, place, VALUE_STRIDES)  # [BLOCK_T]
    _move_rows(value_ptr, value_pages_ptr, token * value_token_stride, target, valid, E, BLOCK_E)
    target = row_start(page, head, place, KEY_STRIDES)
    key = _move_rows(key_ptr, key_pages_ptr, token * key_token_stride, target, valid, D, BLOCK_D).to(tl.float32)
    norm_ptr += (page.to(tl.int64) * H + head) * N + place
    tl.store(norm_ptr, tl.sqrt_rn(tl.sum(key * key, 1)), mask=valid)
    return key


@triton.jit(do_not_specialize=["T", "N", "pages", "room"])
def _append_kernel(
    key_ptr, value_ptr, start_ptr, count_ptr, key_pages_ptr, value_pages_ptr, norm_ptr,
    block_table_ptr, ring_key_ptr, ring_value_ptr, ring_table_ptr, place_ptr, home_key_ptr, home_value_ptr,
    H, T, N, pages, room,
    key_batch_stride, key_head_stride, key_token_stride,
    value_batch_stride, value_head_stride, value_token_stride,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    RING: tl.constexpr, HOMES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start, count = tl.load(start_ptr + request), tl.load(count_ptr + request)
    order = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)  # among the new tokens
    valid = order < count
    position, token = start + order, (T - count + order).to(tl.int64)
    slot = request * pages + position // N
    page = tl.load(block_table_ptr + slot, mask=valid, other=0)
    key_ptr += request * key_batch_stride + head * key_head_stride
    value_ptr += request * value_batch_stride + head * value_head_stride
    append_rows(
        key_ptr, value_ptr, key_pages_ptr, value_pages_ptr, norm_ptr, page, position % N, head, token, valid, H, N,
        key_token_stride, value_token_stride, KEY_STRIDES, VALUE_STRIDES, D, E, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    key, value = token * key_token_stride, token * value_token_stride
    if RING:
        last = valid & (order >= count - room)
        ring_page = tl.load(ring_table_ptr + slot, mask=last, other=0)
        target = row_start(ring_page, head, position % N, KEY_STRIDES)
        _move_rows(key_ptr, ring_key_ptr, key, target, last, D, BLOCK_D)
        target = row_start(ring_page, head, position % N, VALUE_STRIDES)
        _move_rows(value_ptr, ring_value_ptr, value, target, last, E, BLOCK_E)
    if HOMES:
        place = tl.load(place_ptr + head)
        kept = order < tl.where(place >= 0, count, 0)
        target = (page.to(tl.int64) * HOMES + place) * N + position % N
        _move_rows(key_ptr, home_key_ptr, key, target * D, kept, D, BLOCK_D)
        _move_rows(value_ptr, home_value_ptr, value, target * E, kept, E, BLOCK_E)


def append(
    key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor,
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, norm_PHN: torch.Tensor,
    block_table_BP: torch.Tensor, *, ring: Ring | None = None,
) -> None:  # fmt: skip
    """See `reference.append`. D and E up to 256."""
    fixed = (start_B, count_B, key_PHND, value_PHNE, norm_PHN, block_table_BP)
    check_append(key_BHTD, value_BHTE, *fixed, ring=ring)
    (B, H, T, _), N = key_BHTD.shape, key_PHND.shape[2]
    room = 0 if ring is None else ring_room(ring)
    tensors, constants = ring_operands(ring, key_PHND, value_PHNE, block_table_BP)
    block = 1 if T == 1 else BLOCK_T // (2 if constants["HOMES"] else 1)  # three places take many registers
    launch(
        _append_kernel, (B, H, triton.cdiv(T, block)), key_BHTD, value_BHTE, *fixed,
        *tensors, H, T, N, block_table_BP.shape[1], room, *key_BHTD.stride()[:3], *value_BHTE.stride()[:3],
        num_warps=1 if T == 1 else 4, BLOCK_T=block, **constants, **row_constants(key_PHND, value_PHNE),
    )  # fmt: skip


@triton.jit
def slot_position(index_ptr, slot, sink, K, S):
    """Return the positions of slots: the sinks, then the selected tokens, then -1."""
    rank = slot - sink
    selected = tl.load(index_ptr + rank, mask=(rank >= 0) & (rank < K), other=-1)
    return tl.where(slot < S, tl.where(rank < 0, slot, selected), -1)


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
    last = (packed & (following < 0)) | ((slot == 0) & ~packed)
    tl.store(length_ptr + segment + tl.zeros_like(slot), tl.where(packed, slot + 1, 0), mask=last)

    token = tl.maximum(position, 0)
    page = tl.load(block_table_ptr + request * pages + token // N, mask=packed, other=0)
    target = segment * S + slot
    source = row_start(page, head, token % N, KEY_STRIDES)
    _move_rows(key_pages_ptr, key_ptr, source, target * D, packed, D, BLOCK_D)
    source = row_start(page, head, token % N, VALUE_STRIDES)
    _move_rows(value_pages_ptr, value_ptr, source, target * E, packed, E, BLOCK_E)


def pack(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    request_R: torch.Tensor, index_RHK: torch.Tensor, sink_R: torch.Tensor, key_BHSD: torch.Tensor,
    value_BHSE: torch.Tensor, position_BHS: torch.Tensor, length_BH: torch.Tensor, *,
    heads_RH: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """See `reference.pack`. D and E up to 256."""
    pages, segment = (key_PHND, value_PHNE, block_table_BP), (key_BHSD, value_BHSE, position_BHS, length_BH)
    check(*pages, request_R, index_RHK, sink_R, segment, heads_RH)
    (R, H, K), (S, N) = index_RHK.shape, (key_BHSD.shape[2], key_PHND.shape[2])
    constants = row_constants(key_PHND, value_PHNE)
    row_bytes = max(constants["D"], constants["E"]) * key_BHSD.element_size()
    # an empty segment still has a length to write
    grid = (R, H, max(1, triton.cdiv(S, BLOCK_S)))
    launch(
        _pack_kernel, grid, *pages, request_R, index_RHK, sink_R, *segment,
        length_BH if heads_RH is None else heads_RH, H, K, S, N, block_table_BP.shape[1],
        num_warps=8 if row_bytes > WIDE_BYTES else 4,
        BLOCK_S=BLOCK_S, HEADS=heads_RH is not None, **constants,
    )  # fmt: skip


@triton.jit
def _recall_rows(
    host_ptr, old_ptr, into_ptr, host_row, old_row, into_row, packed, on_device,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows from the host, given by their first number, or from the old segment."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    from_host, from_old = (packed & ~on_device)[:, None], (packed & on_device)[:, None]
    fetched = tl.load(host_ptr + host_row[:, None] + column, mask=from_host & inside, other=0.0)
    old = tl.load(old_ptr + old_row[:, None] * WIDTH + column, mask=from_old & inside, other=0.0)
    rows = tl.where(from_old, old, fetched)
    tl.store(into_ptr + into_row[:, None] * WIDTH + column, rows, mask=packed[:, None] & inside)


@triton.jit(do_not_specialize=["K", "S", "N", "pages", "steps"])
def _recall_kernel(
    block_table_ptr, key_pages_ptr, value_pages_ptr, request_ptr, index_ptr, sink_ptr,
    old_key_ptr, old_value_ptr, old_position_ptr, old_length_ptr,
    key_ptr, value_ptr, position_ptr, length_ptr, fetched_ptr, heads_ptr, H, K, S, N, pages, steps,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    refreshed, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    request, pair = tl.load(request_ptr + refreshed).to(tl.int64), refreshed * H + head
    if request < 0:
        return
    if HEADS:  # noqa: SIM102 - known before the kernel is compiled
        if tl.load(heads_ptr + pair) == 0:
            return
    slot = tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)  # [BLOCK_S]
    old_position_ptr += pair * S
    old_length = tl.load(old_length_ptr + pair)
    sink = tl.load(sink_ptr + refreshed)

    index_ptr += pair * K
    position = slot_position(index_ptr, slot, sink, K, S)
    following = slot_position(index_ptr, slot + 1, sink, K, S)
    # how many old positions are smaller, by binary search, and whether the next one is equal
    place = tl.zeros_like(position)
    for step in range(steps):
        candidate = place + (1 << (steps - 1 - step))
        smaller = tl.load(old_position_ptr + candidate - 1, mask=candidate <= old_length, other=0) < position
        place = tl.where((candidate <= old_length) & smaller, candidate, place)
    inside = (position >= 0) & (place < old_length)
    on_device = inside & (tl.load(old_position_ptr + place, mask=inside, other=-1) == position)
    packed, segment = position >= 0, request * H + head
    tl.store(position_ptr + segment * S + slot, position, mask=slot < S)
    # the length is one more than the last packed slot, or 0: one slot of one program knows it
    last = (packed & (following < 0)) | ((slot == 0) & ~packed)
    tl.store(length_ptr + segment + tl.zeros_like(slot), tl.where(packed, slot + 1, 0), mask=last)
    missing = tl.sum((packed & ~on_device).to(tl.int32))
    tl.atomic_add(fetched_ptr + pair, missing, mask=missing > 0, sem="relaxed")

    token = tl.maximum(position, 0)
    table = block_table_ptr + request * pages
    page = tl.load(table + token // N, mask=packed & ~on_device, other=0)
    offset = token % N
    old, into = pair * S + place, segment * S + slot
    host_key = row_start(page, head, offset, KEY_STRIDES)
    host_value = row_start(page, head, offset, VALUE_STRIDES)
    _recall_rows(key_pages_ptr, old_key_ptr, key_ptr, host_key, old, into, packed, on_device, D, BLOCK_D)
    _recall_rows(value_pages_ptr, old_value_ptr, value_ptr, host_value, old, into, packed, on_device, E, BLOCK_E)


def recall(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    request_R: torch.Tensor, index_RHK: torch.Tensor, sink_R: torch.Tensor, old_key_RHSD: torch.Tensor,
    old_value_RHSE: torch.Tensor, old_position_RHS: torch.Tensor, old_length_RH: torch.Tensor,
    key_BHSD: torch.Tensor, value_BHSE: torch.Tensor, position_BHS: torch.Tensor, length_BH: torch.Tensor,
    fetched_RH: torch.Tensor, *, heads_RH: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """See `reference.recall`. D and E up to 256; host pages must not change until the kernel has run."""
    old = old_key_RHSD, old_value_RHSE, old_position_RHS, old_length_RH
    segment = key_BHSD, value_BHSE, position_BHS, length_BH
    check_recall(key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R, old, segment, fetched_RH, heads_RH)
    (R, H, K), (S, N) = index_RHK.shape, (key_BHSD.shape[2], key_PHND.shape[2])
    constants = row_constants(key_PHND, value_PHNE)
    row_bytes = max(constants["D"], constants["E"]) * key_BHSD.element_size()
    fetched_RH.zero_()  # the programs of a head add to one count
    # an empty segment still has a length to write
    grid = (R, H, max(1, triton.cdiv(S, BLOCK_S)))
    launch(
        # the block table comes first: the first tensor's device is where the kernel runs
        _recall_kernel, grid, block_table_BP, key_PHND, value_PHNE, request_R, index_RHK, sink_R,
        *old, *segment, fetched_RH, length_BH if heads_RH is None else heads_RH,
        H, K, S, N, block_table_BP.shape[1], S.bit_length(),
        num_warps=8 if row_bytes > WIDE_BYTES else 4,
        max_registers=NARROW_REGISTERS if row_bytes <= NARROW_BYTES else None,
        BLOCK_S=BLOCK_S, HEADS=heads_RH is not None, **constants,
    )  # fmt: skip
