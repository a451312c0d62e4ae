"""Split-KV decoding attention in Triton: fast and slow requests in one launch, then a join.

A program reads a work item for one KV head: K and V of its units once, 2 * 64 * D numbers each. Page numbers
stay in registers: loading one inside the loop would leave the pipeline a single buffer.
"""

import torch
import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.attention_tile.shape import padded, tile_shape
from sfi_kernels.attention_tile.triton import LN2, LOG2E, add_sink, add_sum, add_tile, finish, rows, scaled_logits
from sfi_kernels.decode_attention.reference import DecodeAttention, check
from sfi_kernels.launch import launch, target
from sfi_kernels.step_descriptor import StepDescriptor

WORDS, UNIT = tl.constexpr(words.WORDS), tl.constexpr(words.UNIT)
LENGTH, START, PACKED = (tl.constexpr(w) for w in (words.LENGTH, words.START, words.PACKED))
ALLOWED_START = tl.constexpr(words.ALLOWED_START)
ALLOWED_STOP = tl.constexpr(words.ALLOWED_STOP)
EVIDENCE, FIRST = tl.constexpr(words.EVIDENCE), tl.constexpr(words.FIRST)
SPLITS = tl.constexpr(words.SPLITS)
PAGE_IDS = 256  # page numbers a program holds at once
# of a thread: shared memory allows two programs a processor, which this does too; left alone, the compiler
# spills for more
REGISTERS = 255


@triton.jit(do_not_specialize=["S", "pages_per_request", "logits_stride"])
def _split_attention_kernel(
    query_ptr,
    packed_key_ptr,
    packed_value_ptr,
    packed_length_ptr,
    position_ptr,
    key_ptr,
    value_ptr,
    block_table_ptr,
    table_ptr,
    work_ptr,
    sink_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    logits_ptr,
    sums_ptr,
    scale,
    soft_cap,
    S,
    pages_per_request,
    logits_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IDS: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SLOW: tl.constexpr,
    GATHER: tl.constexpr,
):
    item, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    request = tl.load(work_ptr + item * 4).to(tl.int64)
    if request < 0:
        return
    begin = tl.load(work_ptr + item * 4 + 1) * UNIT
    stop = begin + tl.load(work_ptr + item * 4 + 2) * UNIT
    row = table_ptr + request * WORDS
    length, start, packed = tl.load(row + LENGTH), tl.load(row + START), tl.load(row + PACKED)
    evidence = tl.load(row + EVIDENCE).to(tl.int64)
    # what follows the packed units are pages, from the one that holds `start`
    packed_stop = tl.cdiv(packed, UNIT) * UNIT
    shift = start // UNIT * UNIT - packed_stop
    packed = tl.minimum(packed, tl.load(packed_length_ptr + request * H + h))
    packed_row = (request * H + h) * S

    g, n, slot = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, IDS)
    query = rows(query_ptr + (request * H + h) * G * D, g, D, g < G, D, BLOCK_D)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    peak_J = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_J = tl.zeros([BLOCK_M], tl.float32)

    for round_begin in range(begin, stop, IDS * BLOCK_N):
        place = round_begin + slot * BLOCK_N
        in_pages = (place >= packed_stop) & (place < stop)
        page_slot = tl.where(in_pages, (place + shift) // PAGE, 0)
        in_pages = in_pages & (page_slot < pages_per_request)
        pages = tl.load(
            block_table_ptr + request * pages_per_request + page_slot, mask=in_pages, other=0
        )
        for tile in range(round_begin, tl.minimum(stop, round_begin + IDS * BLOCK_N), BLOCK_N):
            is_packed = tile < packed_stop
            first = tl.where(is_packed, tile, tile + shift)
            page = tl.sum(tl.where(slot * BLOCK_N == tile - round_begin, pages, 0)).to(tl.int64)
            page_row = (page * H + h) * PAGE + first % PAGE
            token = first + n
            valid = (token >= tl.where(is_packed, 0, start)) & (
                token < tl.where(is_packed, packed, length)
            )
            if GATHER:
                position = tl.load(position_ptr + packed_row + token, mask=valid & is_packed, other=0)
                own = tl.load(block_table_ptr + request * pages_per_request + position // PAGE)
                own_row = (own.to(tl.int64) * H + h) * PAGE + position % PAGE
                source = tl.where(is_packed, own_row, page_row + n)
                key = rows(key_ptr, source, D, valid, D, BLOCK_D)
                value = rows(value_ptr, source, E, valid, E, BLOCK_E)
            else:
                from_packed = packed_row + first
                key_tile = tl.where(is_packed, packed_key_ptr + from_packed * D, key_ptr + page_row * D)
                value_tile = tl.where(
                    is_packed, packed_value_ptr + from_packed * E, value_ptr + page_row * E
                )
                key = rows(key_tile, n, D, valid, D, BLOCK_D)
                value = rows(value_tile, n, E, valid, E, BLOCK_E)
            logits = scaled_logits(query, key, scale, soft_cap, CAPPED)
            if SLOW:
                # Eq. 4
                where = logits_ptr + ((evidence * H + h) * G + g[:, None]) * logits_stride + token[None, :]
                kept = (g[:, None] < G) & valid[None, :] & (evidence >= 0)
                tl.store(where, logits, mask=kept)
                allowed = (token >= tl.load(row + ALLOWED_START)) & (token < tl.load(row + ALLOWED_STOP))
                allowed = allowed & valid
                peak_J, total_J = add_sum(
                    peak_J, total_J, tl.where(allowed[None, :], logits, float("-inf"))
                )
            logits = tl.where(valid[None, :], logits, float("-inf"))
            peak, total, out = add_tile(peak, total, out, logits, value)

    out, lse = finish(peak, total, out)
    own_row = (item * H + h) * G + g
    if SLOW:
        seen = total_J > 0.0
        sum_J = peak_J + tl.log2(tl.where(seen, total_J, 1.0)) * LN2
        tl.store(sums_ptr + own_row, tl.where(seen, sum_J, float("-inf")), mask=g < G)
    e = tl.arange(0, BLOCK_E)
    mask = (g[:, None] < G) & (e[None, :] < E)
    if tl.load(row + SPLITS) == 1:
        if SINKS:
            out = add_sink(out, lse, tl.load(sink_ptr + h * G + g, mask=g < G, other=0.0))
        where = ((request * H + h) * G + g[:, None]) * E + e[None, :]
        tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(lse_ptr + own_row, lse, mask=g < G)
        tl.store(part_ptr + own_row[:, None] * E + e[None, :], out, mask=mask)


@triton.jit
def _join_splits_kernel(
    table_ptr,
    sink_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    sums_ptr,
    log_sum_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SINKS: tl.constexpr,
    SLOW: tl.constexpr,
):
    request, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = table_ptr + request * WORDS
    first, splits = tl.load(row + FIRST).to(tl.int64), tl.load(row + SPLITS)
    g, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    if SLOW:
        evidence = tl.load(row + EVIDENCE).to(tl.int64)
        if evidence >= 0:
            peak_J = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total_J = tl.zeros([BLOCK_M], tl.float32)
            for split in range(splits):
                own_row = ((first + split) * H + h) * G + g
                part = tl.load(sums_ptr + own_row, mask=g < G, other=float("-inf"))
                peak_J, total_J = add_sum(peak_J, total_J, part[:, None])
            seen = total_J > 0.0
            sum_J = peak_J + tl.log2(tl.where(seen, total_J, 1.0)) * LN2
            sum_J = tl.where(seen, sum_J, float("-inf"))
            tl.store(log_sum_ptr + (evidence * H + h) * G + g, sum_J, mask=g < G)
    if splits == 1:  # written where it was computed
        return
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    mask = (g[:, None] < G) & (e[None, :] < E)
    for split in range(splits):
        own_row = ((first + split) * H + h) * G + g
        lse = tl.load(lse_ptr + own_row, mask=g < G, other=float("-inf"))
        part = tl.load(part_ptr + own_row[:, None] * E + e[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, lse)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay, weight = tl.exp2((peak - base) * LOG2E), tl.exp2((lse - base) * LOG2E)
        total = total * decay + weight
        out = out * decay[:, None] + part * weight[:, None]
        peak = new_peak
    out, lse = finish(peak, total, out)
    if SINKS:
        out = add_sink(out, lse, tl.load(sink_ptr + h * G + g, mask=g < G, other=0.0))
    where = ((request * H + h) * G + g[:, None]) * E + e[None, :]
    tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=mask)


def decode_attention(
    query_BHGD: torch.Tensor,
    packed_key_BHSD: torch.Tensor,
    packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor,
    descriptor: StepDescriptor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_HG: torch.Tensor | None = None,
    evidence: bool = False,
) -> DecodeAttention:
    """See `reference.decode_attention`. Heads of at most 256 numbers, pages of multiples of 16 tokens."""
    return attend(
        query_BHGD,
        packed_key_BHSD,
        packed_value_BHSE,
        packed_length_BH,
        key_PHND,
        value_PHNE,
        block_table_BP,
        descriptor,
        scale=scale,
        soft_cap=soft_cap,
        sink_HG=sink_HG,
        evidence=evidence,
    )


def attend(
    query_BHGD: torch.Tensor,
    packed_key_BHSD: torch.Tensor,
    packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor,
    descriptor: StepDescriptor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_HG: torch.Tensor | None = None,
    evidence: bool = False,
    block_n: int | None = None,
    position_BHS: torch.Tensor | None = None,
) -> DecodeAttention:
    """Run `decode_attention`, or one of the variants that the kernel benchmark compares it with.

    Args beyond those of `reference.decode_attention`:
        block_n: Keys of a tile; None is ours.
        position_BHS: Positions of the packed rows: read these from the pages, and no packed row at all.
    """
    check(query_BHGD, packed_key_BHSD, packed_value_BHSE, packed_length_BH, key_PHND, value_PHNE,
          block_table_BP, descriptor, sink_HG)  # fmt: skip
    B, H, G, D = query_BHGD.shape
    S, page_size, E = packed_key_BHSD.shape[2], key_PHND.shape[2], value_PHNE.shape[3]
    tile = tile_shape(key_PHND, value_PHNE, page_size, target(query_BHGD.device))
    items, slow = descriptor.work_XI.shape[0], len(descriptor.slow)
    query_BHGD = query_BHGD.contiguous()

    keeps = evidence and slow > 0
    out_BHGE = query_BHGD.new_empty(B, H, G, E)
    part = query_BHGD.new_empty(items, H, G, E, dtype=torch.float32)
    lse = query_BHGD.new_empty(items, H, G, dtype=torch.float32)
    sums = torch.empty_like(lse) if keeps else lse
    logits = log_sum = lse
    if keeps:
        # -inf: what a shorter request than the longest never sees
        logits = lse.new_full((slow, H, G, 1, descriptor.longest), -torch.inf)
        log_sum = lse.new_empty(slow, H, G, 1)

    table, sink = descriptor.table_BX, lse if sink_HG is None else sink_HG.float().contiguous()
    common = {
        "H": H, "G": G, "E": E, "BLOCK_M": padded(G), "BLOCK_E": tile.value_width,
        "SINKS": sink_HG is not None, "SLOW": keeps,
    }  # fmt: skip
    launch(
        _split_attention_kernel, (items, H),
        query_BHGD, packed_key_BHSD, packed_value_BHSE, packed_length_BH,
        packed_length_BH if position_BHS is None else position_BHS,
        key_PHND, value_PHNE, block_table_BP, table, descriptor.work_XI, sink,
        out_BHGE, part, lse, logits, sums, scale, soft_cap or 1.0, S, block_table_BP.shape[1],
        descriptor.longest,
        D=D, PAGE=page_size, BLOCK_N=block_n or tile.tokens, BLOCK_D=tile.key_width, IDS=PAGE_IDS,
        CAPPED=soft_cap is not None, GATHER=position_BHS is not None, **common,
        # float32 products run in registers, which need more threads
        num_warps=8 if key_PHND.dtype == torch.float32 else 4, num_stages=tile.stages,
        max_registers=REGISTERS,
    )  # fmt: skip
    launch(_join_splits_kernel, (B, H), table, sink, out_BHGE, part, lse, sums, log_sum, **common)
    return DecodeAttention(out_BHGE, logits if keeps else None, log_sum if keeps else None)
