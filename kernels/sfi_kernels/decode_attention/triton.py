"""Split-KV decoding attention in Triton: one launch for fast and slow requests, then a join by log-sum-exp.

A program of the join loads all splits of a query head at once: thirty wait for memory as often as two.
"""

import math

import torch
import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.attention_tile import REGISTERS, SEVERAL, padded, parts_of_pass, tile_shape
from sfi_kernels.attention_tile.triton import LOG2E, add_sum, add_terms, finish, log_sum
from sfi_kernels.chained_triton import await_previous
from sfi_kernels.decode_attention import reference
from sfi_kernels.decode_attention.reference import DecodeAttention, check, check_room, resident_programs, work_items
from sfi_kernels.decode_attention.split_triton import QUERIES
from sfi_kernels.decode_attention.split_triton import _split_attention_kernel as split_attention
from sfi_kernels.launch import launch, target
from sfi_kernels.op import check_int32, check_shapes
from sfi_kernels.pages import Ring, kernel_strides, ring_operands
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.step_descriptor import StepDescriptor

PAGE_IDS = 256  # page numbers a program holds at once
JOINED = reference.MAX_SPLITS  # partial results that a program of the join holds at once: all of a request's
WORDS, EVIDENCE, UNIT = (tl.constexpr(word) for word in (words.WORDS, words.EVIDENCE, words.UNIT))
MODE, LENGTH, START = (tl.constexpr(word) for word in (words.MODE, words.LENGTH, words.START))
PACKED, FIRST, SPLITS = (tl.constexpr(word) for word in (words.PACKED, words.FIRST, words.SPLITS))
IDLE, FAST, SLOW = (tl.constexpr(mode) for mode in (words.IDLE, words.FAST, words.SLOW))
MIN_UNITS, MAX_SPLITS = tl.constexpr(reference.MIN_UNITS), tl.constexpr(reference.MAX_SPLITS)
OVERHEAD, CANDIDATES = tl.constexpr(reference.OVERHEAD), tl.constexpr(reference.CANDIDATES)


@triton.jit(do_not_specialize=["B", "items", "heads", "programs"])
def _split_plan_kernel(table_ptr, work_ptr, B, items, heads, programs, BLOCK_B: tl.constexpr, BLOCK_X: tl.constexpr):
    request = tl.arange(0, BLOCK_B)
    exists = request < B
    row = table_ptr + request * WORDS
    mode = tl.load(row + MODE, mask=exists, other=IDLE)
    length = tl.load(row + LENGTH, mask=exists, other=0)
    start = tl.load(row + START, mask=exists, other=0)
    packed = tl.load(row + PACKED, mask=exists, other=0)
    units = tl.cdiv(packed, UNIT) + tl.cdiv(length, UNIT) - start // UNIT
    units = tl.where(mode < FAST, 0, units)

    total = tl.sum(units)
    least = tl.maximum(MIN_UNITS, tl.cdiv(11 * heads * total, 10 * programs))
    least = tl.maximum(least, tl.cdiv(tl.max(units), MAX_SPLITS))
    size, cheapest = least, 2147483647
    for extra in tl.static_range(CANDIDATES):
        candidate = least + least * extra // CANDIDATES
        splits = tl.cdiv(units, candidate)
        waves = tl.cdiv(tl.sum(splits) * heads, programs)
        cost = waves * (candidate + OVERHEAD)
        size = tl.where(cost < cheapest, candidate, size)
        cheapest = tl.minimum(cost, cheapest)

    splits = tl.cdiv(units, size)
    slow = tl.where(mode == SLOW, splits, 0)
    fast = splits - slow
    first = tl.where(mode == SLOW, tl.cumsum(slow) - slow, tl.sum(slow) + tl.cumsum(fast) - fast)
    tl.store(row + FIRST, first, mask=exists)
    tl.store(row + SPLITS, splits, mask=exists)

    share = tl.cdiv(units, tl.maximum(splits, 1))
    for split in range(tl.max(splits)):
        item = work_ptr + (first + split) * 4
        valid = exists & (split < splits)
        tl.store(item, request, mask=valid)
        tl.store(item + 1, split * share, mask=valid)
        tl.store(item + 2, tl.minimum(share, units - split * share), mask=valid)
        tl.store(item + 3, 0, mask=valid)
    used = tl.sum(splits)
    for begin in range(0, items, BLOCK_X):
        spare = begin + tl.arange(0, BLOCK_X)
        valid = (spare >= used) & (spare < items)
        tl.store(work_ptr + spare * 4, -1, mask=valid)
        for word in tl.static_range(1, 4):
            tl.store(work_ptr + spare * 4 + word, 0, mask=valid)


@triton.jit(do_not_specialize=["W", "pseudo_parts"])
def _join_splits_kernel(
    table_ptr, sink_ptr, pseudo_logit_ptr, pseudo_value_ptr, out_ptr, part_ptr, lse_ptr, sums_ptr,
    log_sum_ptr, W, pseudo_parts, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr, PSEUDO: tl.constexpr,
    SLOW: tl.constexpr, SEVERAL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    request, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, place_GW = table_ptr + request * WORDS, tl.program_id(2)
    hands_out, size_GW, g = True, G, place_GW + tl.arange(0, 1)
    if SEVERAL:
        queries, w = tl.load(row + QUERIES), place_GW % W
        if w < W - queries:  # padding, whose output is zero already
            return
        hands_out = w == W - 1
        size_GW, g = G * W, g // W
    first, splits = tl.load(row + FIRST).to(tl.int64), tl.load(row + SPLITS)
    stride, head_row = H * size_GW, (first * H + h) * size_GW + place_GW
    if SLOW:
        evidence = tl.load(row + EVIDENCE).to(tl.int64)
        if (evidence >= 0) & hands_out:
            peak_J, total_J = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
            for begin in range(0, splits, TILE):
                split = begin + tl.arange(0, TILE)
                part = tl.load(sums_ptr + head_row + split * stride, mask=split < splits, other=float("-inf"))
                peak_J, total_J = add_sum(peak_J, total_J, part[None, :])
            tl.store(log_sum_ptr + (evidence * H + h) * G + g, log_sum(peak_J, total_J))
    if splits == 1:  # the split kernel has written the output
        return
    e = tl.arange(0, BLOCK_E)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    out = tl.zeros([1, BLOCK_E], tl.float32)
    for begin in range(0, splits, TILE):
        split = begin + tl.arange(0, TILE)
        own_row = head_row + split * stride
        lse = tl.load(lse_ptr + own_row, mask=split < splits, other=float("-inf"))
        mask = (split < splits)[:, None] & (e[None, :] < E)
        part = tl.load(part_ptr + own_row[:, None] * E + e[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2((lse[None, :] - base[:, None]) * LOG2E)  # [1, TILE]
        decay = tl.exp2((peak - base) * LOG2E)
        total = total * decay + tl.sum(weight, 1)
        shares = tl.sum(part * tl.trans(weight), 0)
        out = out * decay[:, None] + shares[None, :]
        peak = new_peak
    out, lse = finish(peak, total, out)
    pair = request * H + h
    out = add_terms(
        out, lse, sink_ptr, pseudo_logit_ptr, pseudo_value_ptr, pseudo_parts, pair, h, g, G, E, BLOCK_E, SINKS, PSEUDO
    )
    where = (pair * size_GW + place_GW) * E + e[None, :]
    tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=e[None, :] < E)


def decode_attention(
    query_BHGWD: torch.Tensor, packed_key_BHSD: torch.Tensor, packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, descriptor: StepDescriptor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None, evidence: bool = False,
    into: torch.Tensor | None = None, out: torch.Tensor | None = None,
    dense_BH: torch.Tensor | None = None, pseudo: PseudoToken | None = None,
    position_BHS: torch.Tensor | None = None, ring: Ring | None = None, block_n: int | None = None,
) -> DecodeAttention:  # fmt: skip
    """See `reference.decode_attention`. Heads of at most 256 numbers, pages of multiples of 16 tokens.

    The kernel benchmark asks for tiles of `block_n` keys; None takes ours.
    """
    check(query_BHGWD, packed_key_BHSD, packed_value_BHSE, packed_length_BH, key_PHND, value_PHNE,
          block_table_BP, descriptor, sink_HG, dense_BH, pseudo, position_BHS, ring, out)  # fmt: skip
    B, H, G, W, D = query_BHGWD.shape
    S = (packed_key_BHSD if position_BHS is None else position_BHS).shape[2]
    page_size, E = key_PHND.shape[2], value_PHNE.shape[3]
    chip, items = target(query_BHGWD.device), descriptor.work_XI.shape[0]
    tile = tile_shape(key_PHND, value_PHNE, page_size, chip)
    keeps = evidence and descriptor.slow_rows > 0
    if not query_BHGWD[0].is_contiguous():  # a request's heads may be parts of a wider row
        query_BHGWD = query_BHGWD.contiguous()

    # no program writes the padding of a pass with several queries
    out_BHGWE = (query_BHGWD.new_empty if W == 1 else query_BHGWD.new_zeros)(B, H, G, W, E) if out is None else out
    part = query_BHGWD.new_empty(items, H, G, W, E, dtype=torch.float32)
    lse = query_BHGWD.new_empty(items, H, G, W, dtype=torch.float32)
    sums = logits = log_sum = lse
    if keeps:
        shape = (descriptor.slow_rows, H, G, 1, descriptor.longest)
        numbers, sums = math.prod(shape), torch.empty_like(lse)
        room = lse.new_empty(numbers + math.prod(shape[:4])) if into is None else into
        logits, log_sum = room[:numbers].view(shape), room[numbers:][: math.prod(shape[:4])].view(shape[:4])
        if dense_BH is not None:
            logits.fill_(-torch.inf)  # the kernel leaves those of a mixed request's sparse heads

    table, sink = descriptor.table_BX, lse if sink_HG is None else sink_HG.float().contiguous()
    term, pseudo_parts = (lse, lse), 1
    if pseudo is not None:
        pseudo_parts = pseudo.logit_BHG[0, 0, 0].numel()
        term = pseudo.logit_BHG.float().contiguous(), pseudo.value_BHE.float().contiguous()
    near, tiers = ring_operands(ring, key_PHND, value_PHNE, block_table_BP)
    common = {"H": H, "G": G, "E": E, "BLOCK_E": tile.value_width, "SINKS": sink_HG is not None, "SLOW": keeps}
    for kind, queries, tiles in parts_of_pass(G, W, tile, chip, full=key_PHND.dtype == torch.float32):
        single = kind != SEVERAL
        launch(
            split_attention, (items * tiles, H),
            query_BHGWD, packed_key_BHSD, packed_value_BHSE, packed_length_BH,
            packed_length_BH if dense_BH is None else dense_BH,
            packed_length_BH if position_BHS is None else position_BHS,
            key_PHND, value_PHNE, block_table_BP, *near, table, descriptor.work_XI, sink,
            *term, out_BHGWE, part, lse, logits, sums, scale, soft_cap or 1.0, S,
            block_table_BP.shape[1], descriptor.longest, W, pseudo_parts, query_BHGWD.stride(0),
            KEY_STRIDES=kernel_strides(key_PHND, "key"), VALUE_STRIDES=kernel_strides(value_PHNE, "value"),
            D=D, PAGE=page_size, BLOCK_M=queries.rows, BLOCK_J=padded(G), BLOCK_N=block_n or queries.tokens,
            BLOCK_D=tile.key_width, IDS=PAGE_IDS, CAPPED=soft_cap is not None, KIND=kind,
            # what a request with several queries does not have
            GATHER=single and position_BHS is not None, HEADS=single and dense_BH is not None,
            PSEUDO=single and pseudo is not None, **tiers, **common,
            num_warps=queries.warps, num_stages=queries.stages, max_registers=queries.registers,
        )  # fmt: skip
    launch(
        _join_splits_kernel, (B, H, G * W), table, sink, *term, out_BHGWE, part, lse, sums,
        log_sum, W, pseudo_parts, PSEUDO=pseudo is not None, SEVERAL=W > 1, **common,
        TILE=JOINED, max_registers=REGISTERS,
    )  # fmt: skip
    return DecodeAttention(out_BHGWE, logits if keeps else None, log_sum if keeps else None)


def sparse_attention(
    query_BHGD: torch.Tensor, packed_key_BHSD: torch.Tensor, packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, recent_start_B: torch.Tensor, length_B: torch.Tensor, *,
    scale: float, soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
    pseudo: PseudoToken | None = None, position_BHS: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `reference.sparse_attention`. Heads of at most 256 numbers, pages of multiples of 16 tokens."""
    B, H, programs = *query_BHGD.shape[:2], resident_programs(query_BHGD.device)
    check_shapes("length B, recent_start B", length_B, recent_start_B, B=B)
    check_int32(query_BHGD.device, length=length_B, recent_start=recent_start_B)
    packed = (packed_key_BHSD if position_BHS is None else position_BHS).shape[2]
    step = words.fast_step(recent_start_B, length_B, work_items(B, H, programs), packed)
    split_plan(step, H, programs)
    return decode_attention(
        query_BHGD[:, :, :, None], packed_key_BHSD, packed_value_BHSE, packed_length_BH, key_PHND,
        value_PHNE, block_table_BP, step, scale=scale, soft_cap=soft_cap, sink_HG=sink_HG, pseudo=pseudo,
        position_BHS=position_BHS,
    ).out_BHGWE[:, :, :, 0]  # fmt: skip


def split_plan(descriptor: StepDescriptor, heads: int, programs: int) -> None:
    """See `reference.split_plan`: one program, so that the host does not wait for the lengths."""
    check_room(descriptor, heads, programs)
    B, items = descriptor.batch, descriptor.work_XI.shape[0]
    launch(
        _split_plan_kernel, (1,), descriptor.table_BX, descriptor.work_XI, B, items, heads, programs,
        BLOCK_B=triton.next_power_of_2(B), BLOCK_X=128,
    )  # fmt: skip
