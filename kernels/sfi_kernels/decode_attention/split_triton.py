"""The split kernel. A program reads the K and V rows of its units once, 64 * (D + E) numbers a unit.

A mixed request has the work items of a dense read. A sparse head numbers units of its own over the same
items: its packed units, then those from the recent segment on. These are fewer as a rule, and an item behind
the head's last unit leaves a part that weighs nothing. They are one more where the packed rows fill all that
precedes a recent segment that begins inside a unit: the last item reads what is left, however much.

Page numbers stay in registers: loading one inside the loop would leave the pipeline a single buffer.
"""

import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.attention_tile.triton import (
    add_sum,
    add_terms,
    add_tile,
    finish,
    log_sum,
    rows,
    scaled_logits,
)

WORDS, UNIT = tl.constexpr(words.WORDS), tl.constexpr(words.UNIT)
LENGTH, START, PACKED = (tl.constexpr(w) for w in (words.LENGTH, words.START, words.PACKED))
ALLOWED_START = tl.constexpr(words.ALLOWED_START)
ALLOWED_STOP = tl.constexpr(words.ALLOWED_STOP)
EVIDENCE, SPLITS = tl.constexpr(words.EVIDENCE), tl.constexpr(words.SPLITS)
MIXED = tl.constexpr(words.MIXED)


@triton.jit
def _page_ids(table, place, packed_stop, stop, shift, pages_per_request, PAGE: tl.constexpr):
    """Load the page numbers of tiles; 0 for the packed ones."""
    page_slot = (place + shift) // PAGE
    in_pages = (place >= packed_stop) & (place < stop) & (page_slot < pages_per_request)
    return tl.load(table + page_slot, mask=in_pages, other=0)


@triton.jit
def _sparse_stop(stop, length, start, packed):
    """Return where a sparse head stops in an item of a dense read that stops at `stop`."""
    dense_stop = tl.cdiv(length, UNIT) * UNIT
    own_stop = tl.cdiv(packed, UNIT) * UNIT + dense_stop - start // UNIT * UNIT
    return tl.where(stop < dense_stop, tl.minimum(stop, own_stop), own_stop)


@triton.jit
def _store_logits(pointer, logits, g, token, stride, kept, G: tl.constexpr):
    """Hand out a tile's logits."""
    # Eq. 4
    where = pointer + g[:, None].to(tl.int64) * stride + token[None, :]
    tl.store(where, logits, mask=(g[:, None] < G) & kept[None, :])


@triton.jit(do_not_specialize=["S", "pages_per_request", "logits_stride"])
def _split_attention_kernel(
    query_ptr,
    packed_key_ptr,
    packed_value_ptr,
    packed_length_ptr,
    dense_ptr,
    position_ptr,
    key_ptr,
    value_ptr,
    block_table_ptr,
    table_ptr,
    work_ptr,
    sink_ptr,
    pseudo_logit_ptr,
    pseudo_value_ptr,
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
    PSEUDO: tl.constexpr,
    SLOW: tl.constexpr,
    GATHER: tl.constexpr,
    HEADS: tl.constexpr,
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
    allowed_start, allowed_stop = tl.load(row + ALLOWED_START), tl.load(row + ALLOWED_STOP)
    evidence_stop = tl.where(evidence >= 0, length, 0)
    logits_to = logits_ptr + (evidence * H + h) * G * logits_stride
    pair, packed_row = request * H + h, (request * H + h) * S
    if HEADS:
        mixed = tl.load(row + MIXED)
        sparse = (mixed != 0) & (tl.load(dense_ptr + pair) == 0)
        start = tl.where(sparse, mixed - 1, start)
        packed = tl.where(sparse, tl.load(packed_length_ptr + pair), packed)
        evidence_stop = tl.where(sparse, 0, evidence_stop)
        stop = tl.where(sparse, _sparse_stop(stop, length, start, packed), stop)
    # the packed units are followed by pages, from the page that holds `start`
    packed_stop = tl.cdiv(packed, UNIT) * UNIT
    shift = start // UNIT * UNIT - packed_stop
    packed = tl.minimum(packed, tl.load(packed_length_ptr + pair))
    table = block_table_ptr + request * pages_per_request

    g, n, slot = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, IDS)
    query = rows(query_ptr + pair * G * D, g, D, g < G, D, BLOCK_D)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    peak_J = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_J = tl.zeros([BLOCK_M], tl.float32)

    for round_begin in range(begin, stop, IDS * BLOCK_N):
        place = round_begin + slot * BLOCK_N
        pages = _page_ids(table, place, packed_stop, stop, shift, pages_per_request, PAGE)
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
                in_segment = token < tl.where(is_packed, packed, 0)
                position = tl.load(position_ptr + packed_row + token, mask=in_segment, other=0)
                own = tl.load(table + position // PAGE)
                own_row = (own.to(tl.int64) * H + h) * PAGE + position % PAGE
                source = tl.where(is_packed, own_row, page_row + n)
                key = rows(key_ptr, source, D, valid, D, BLOCK_D)
                value = rows(value_ptr, source, E, valid, E, BLOCK_E)
            else:
                from_packed = packed_row + first
                key_tile = tl.where(
                    is_packed, packed_key_ptr + from_packed * D, key_ptr + page_row * D
                )
                value_tile = tl.where(
                    is_packed, packed_value_ptr + from_packed * E, value_ptr + page_row * E
                )
                key = rows(key_tile, n, D, valid, D, BLOCK_D)
                value = rows(value_tile, n, E, valid, E, BLOCK_E)
            logits = scaled_logits(query, key, scale, soft_cap, CAPPED)
            if SLOW:
                handed_out = token < evidence_stop
                _store_logits(logits_to, logits, g, token, logits_stride, handed_out, G)
                allowed = (token >= allowed_start) & (token < allowed_stop) & handed_out
                in_J = tl.where(allowed[None, :], logits, float("-inf"))
                peak_J, total_J = add_sum(peak_J, total_J, in_J)
            logits = tl.where(valid[None, :], logits, float("-inf"))
            peak, total, out = add_tile(peak, total, out, logits, value)

    out, lse = finish(peak, total, out)
    own_row = (item * H + h) * G + g
    if SLOW:
        tl.store(sums_ptr + own_row, log_sum(peak_J, total_J), mask=g < G)
    e = tl.arange(0, BLOCK_E)
    mask = (g[:, None] < G) & (e[None, :] < E)
    if tl.load(row + SPLITS) == 1:
        out = add_terms(
            out, lse, sink_ptr, pseudo_logit_ptr, pseudo_value_ptr, pair, h, g,
            G, E, BLOCK_E, SINKS, PSEUDO,
        )  # fmt: skip
        where = (pair * G + g[:, None]) * E + e[None, :]
        tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(lse_ptr + own_row, lse, mask=g < G)
        tl.store(part_ptr + own_row[:, None] * E + e[None, :], out, mask=mask)
