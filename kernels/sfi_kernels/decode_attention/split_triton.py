"""The split kernel. A program reads the K and V rows of its units once, 64 * (D + E) numbers a unit.

A mixed request has the work items of a dense read. Its sparse heads spread units of their own over the same items:
first the packed units, then those from the recent segment on. These are fewer as a rule; an item behind the head's last
unit writes a part of weight zero. They can be one more, where the packed rows cover everything before a recent segment
that begins inside a unit: the last item reads all that is left.

With a ring the pages of all tokens are in host memory: dense reads go there, in place over the link, or to the pages of
heads that are kept on the device; sparse ones find the recent tokens in the ring.

Page numbers stay in registers: loading one inside the loop would leave the pipeline a single buffer.
"""

import triton
import triton.language as tl

from sfi_kernels import attention_tile as kinds
from sfi_kernels import step_descriptor as words
from sfi_kernels.attention_tile.triton import (
    add_sum,
    add_terms,
    add_tile,
    finish,
    log_sum,
    row_start,
    rows,
    scaled_logits,
)
from sfi_kernels.chained_triton import await_previous

EACH, LAST, SEVERAL = (tl.constexpr(kind) for kind in (kinds.EACH, kinds.LAST, kinds.SEVERAL))
QUERIES = tl.constexpr(words.QUERIES)
WORDS, UNIT = tl.constexpr(words.WORDS), tl.constexpr(words.UNIT)
LENGTH, START, PACKED = (tl.constexpr(word) for word in (words.LENGTH, words.START, words.PACKED))
MODE, FAST = tl.constexpr(words.MODE), tl.constexpr(words.FAST)
ALLOWED_START, ALLOWED_STOP = tl.constexpr(words.ALLOWED_START), tl.constexpr(words.ALLOWED_STOP)
EVIDENCE, SPLITS, MIXED = (tl.constexpr(word) for word in (words.EVIDENCE, words.SPLITS, words.MIXED))
SLOT = tl.constexpr(words.SLOT)


@triton.jit
def _step(is_packed, WIDTH: tl.constexpr, STRIDES: tl.constexpr):
    """Return the distance between a tile's rows, packed or in a page; a constant where both are equal."""
    step = WIDTH
    if STRIDES[2] != WIDTH:
        step = tl.where(is_packed, WIDTH, STRIDES[2])
    return step


@triton.jit
def _sparse_stop(stop, length, start, packed):
    """Return where a sparse head stops in a work item of a dense read that stops at `stop`."""
    dense_stop = tl.cdiv(length, UNIT) * UNIT
    own_stop = tl.cdiv(packed, UNIT) * UNIT + dense_stop - start // UNIT * UNIT
    return tl.where(stop < dense_stop, tl.minimum(stop, own_stop), own_stop)


@triton.jit(do_not_specialize=["S", "pages_per_request", "logits_stride", "W", "pseudo_parts", "query_stride"])
def _split_attention_kernel(
    query_ptr, packed_key_ptr, packed_value_ptr, packed_length_ptr, dense_ptr, position_ptr,
    key_ptr, value_ptr, block_table_ptr, ring_key_ptr, ring_value_ptr, ring_table_ptr, place_ptr,
    home_key_ptr, home_value_ptr, table_ptr, work_ptr, sink_ptr, pseudo_logit_ptr, pseudo_value_ptr,
    out_ptr, part_ptr, lse_ptr, logits_ptr, sums_ptr, scale, soft_cap, S, pages_per_request,
    logits_stride, W, pseudo_parts, query_stride, KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, IDS: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, PSEUDO: tl.constexpr, SLOW: tl.constexpr, GATHER: tl.constexpr,
    HEADS: tl.constexpr, KIND: tl.constexpr, RING: tl.constexpr, HOMES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    item, row_tile, tiles = tl.program_id(0), 0, 1
    if KIND == SEVERAL:  # the tiles of an item run side by side, so that they share what they read
        tiles = tl.cdiv(G * W, BLOCK_M)
        item, row_tile = item // tiles, item % tiles
    item, h = item.to(tl.int64), tl.program_id(1).to(tl.int64)
    request = tl.load(work_ptr + item * 4).to(tl.int64)
    if request < 0:
        return
    begin = tl.load(work_ptr + item * 4 + 1) * UNIT
    stop = begin + tl.load(work_ptr + item * 4 + 2) * UNIT
    row = table_ptr + request * WORDS
    if KIND != EACH:  # the other launch attends for this request, or the tile has none of its queries
        queries = tl.load(row + QUERIES)
        idle = queries > 1
        if KIND == SEVERAL:
            idle = (queries <= 1) | ((row_tile + 1) * BLOCK_M <= (W - queries) * G)
        if idle:
            return
    length, start, packed = tl.load(row + LENGTH), tl.load(row + START), tl.load(row + PACKED)
    evidence = tl.load(row + EVIDENCE).to(tl.int64)
    allowed_start, allowed_stop = tl.load(row + ALLOWED_START), tl.load(row + ALLOWED_STOP)
    evidence_stop = tl.where(evidence >= 0, length, 0)
    logits_to = logits_ptr + (evidence * H + h) * G * logits_stride
    pair, packed_pair = request * H + h, tl.maximum(tl.load(row + SLOT), 0).to(tl.int64) * H + h
    packed_row = packed_pair * S
    if HEADS:
        mixed = tl.load(row + MIXED)
        sparse = (mixed != 0) & (tl.load(dense_ptr + pair) == 0)
        start = tl.where(sparse, mixed - 1, start)
        packed = tl.where(sparse, tl.load(packed_length_ptr + packed_pair), packed)
        evidence_stop = tl.where(sparse, 0, evidence_stop)
        stop = tl.where(sparse, _sparse_stop(stop, length, start, packed), stop)
    # the packed units are followed by pages, from the page that holds `start`
    packed_stop = tl.cdiv(packed, UNIT) * UNIT
    shift = start // UNIT * UNIT - packed_stop
    packed = tl.minimum(packed, tl.load(packed_length_ptr + packed_pair))
    table, head, less_key, less_value = block_table_ptr, h, 0, 0
    if RING:
        recent = tl.load(row + MODE) == FAST
        if HEADS:
            recent = tl.where(mixed != 0, sparse, recent)
        if HOMES:  # pages of fewer heads lie closer together
            home = tl.load(place_ptr + h).to(tl.int64)
            at_home = home >= 0
            key_ptr = tl.where(at_home, home_key_ptr, key_ptr)
            value_ptr = tl.where(at_home, home_value_ptr, value_ptr)
            at_home &= ~recent
            head = tl.where(at_home, home, h)
            less_key = tl.where(at_home, (H - HOMES) * KEY_STRIDES[1], 0)
            less_value = tl.where(at_home, (H - HOMES) * VALUE_STRIDES[1], 0)
        key_ptr = tl.where(recent, ring_key_ptr, key_ptr)
        value_ptr = tl.where(recent, ring_value_ptr, value_ptr)
        table = tl.where(recent, ring_table_ptr, table)
    table += request * pages_per_request

    n, slot = tl.arange(0, BLOCK_N), tl.arange(0, IDS)
    # the tile's rows: query heads, places in [G, W], and whether they are queries
    g = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    place_GW, is_query, last, size_GW = g, g < G, g, G if KIND == EACH else G * W
    if KIND == LAST:
        place_GW = g * W + W - 1
    elif KIND == SEVERAL:  # a query's heads are adjacent; `last` is the position of its own token
        g, w = g % G, g // G
        place_GW, is_query = g * W + w, (w < W) & (w >= W - queries)
        last = tl.where(is_query, length - W + w, -1)
    queries_at = query_ptr + request * query_stride + h * size_GW * D
    query = rows(queries_at, place_GW, D, is_query, D, BLOCK_D)
    # with one query a request the evidence's are the tile's own rows, with several they are rows of the last tile
    g_J, place_J, is_query_J, query_J = g, place_GW, is_query, query
    if KIND == SEVERAL:
        g_J = tl.arange(0, BLOCK_J)
        place_J, is_query_J = g_J * W + W - 1, g_J < tl.where(row_tile == tiles - 1, G, 0)
        query_J = rows(queries_at, place_J, D, is_query_J, D, BLOCK_D)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    peak_J = tl.full([BLOCK_J], float("-inf"), tl.float32)
    total_J = tl.zeros([BLOCK_J], tl.float32)

    for round_begin in range(begin, stop, IDS * BLOCK_N):
        place = round_begin + slot * BLOCK_N
        page_slot = (place + shift) // PAGE
        in_pages = (place >= packed_stop) & (place < stop) & (page_slot < pages_per_request)
        pages = tl.load(table + page_slot, mask=in_pages, other=0)
        for tile in range(round_begin, tl.minimum(stop, round_begin + IDS * BLOCK_N), BLOCK_N):
            is_packed = tile < packed_stop
            first = tl.where(is_packed, tile, tile + shift)
            page = tl.sum(tl.where(slot * BLOCK_N == tile - round_begin, pages, 0))
            token, place_in_page = first + n, first % PAGE
            valid = (token >= tl.where(is_packed, 0, start)) & (token < tl.where(is_packed, packed, length))
            if GATHER:
                in_segment = token < tl.where(is_packed, packed, 0)
                position = tl.load(position_ptr + packed_row + token, mask=in_segment, other=0)
                own_page = tl.where(is_packed, tl.load(table + position // PAGE), page)
                own_place = tl.where(is_packed, position % PAGE, place_in_page + n)
                key_row = row_start(own_page, h, own_place, KEY_STRIDES)
                value_row = row_start(own_page, h, own_place, VALUE_STRIDES)
                key = rows(key_ptr, key_row, 1, valid, D, BLOCK_D)
                value = rows(value_ptr, value_row, 1, valid, E, BLOCK_E)
            else:
                from_packed = packed_row + first
                key_tile = key_ptr + row_start(page, head, place_in_page, KEY_STRIDES)
                value_tile = value_ptr + row_start(page, head, place_in_page, VALUE_STRIDES)
                if HOMES:
                    key_tile -= page.to(tl.int64) * less_key
                    value_tile -= page.to(tl.int64) * less_value
                key_tile = tl.where(is_packed, packed_key_ptr + from_packed * D, key_tile)
                key = rows(key_tile, n, _step(is_packed, D, KEY_STRIDES), valid, D, BLOCK_D)
                value_tile = tl.where(is_packed, packed_value_ptr + from_packed * E, value_tile)
                value = rows(value_tile, n, _step(is_packed, E, VALUE_STRIDES), valid, E, BLOCK_E)
            logits = scaled_logits(query, key, scale, soft_cap, CAPPED)
            if SLOW:
                logits_J, handed_out = logits, token < evidence_stop
                if KIND == SEVERAL:  # computed anew: sums over J of every row would overflow the registers
                    logits_J = scaled_logits(query_J, key, scale, soft_cap, CAPPED)
                    logits_J = tl.where(token[None, :] < length, logits_J, float("-inf"))
                # Eq. 4
                where = logits_to + g_J[:, None].to(tl.int64) * logits_stride + token[None, :]
                tl.store(where, logits_J, mask=is_query_J[:, None] & handed_out[None, :])
                allowed = (token >= allowed_start) & (token < allowed_stop) & handed_out
                in_J = tl.where(allowed[None, :], logits_J, float("-inf"))
                peak_J, total_J = add_sum(peak_J, total_J, in_J)
            seen = valid[None, :]
            if KIND == SEVERAL:  # of a row, the tokens up to its own
                seen = token[None, :] <= last[:, None]
            logits = tl.where(seen, logits, float("-inf"))
            peak, total, out = add_tile(peak, total, out, logits, value)

    out, lse = finish(peak, total, out)
    item_row = (item * H + h) * size_GW
    own_row = item_row + place_GW
    if SLOW:
        tl.store(sums_ptr + item_row + place_J, log_sum(peak_J, total_J), mask=is_query_J)
    e = tl.arange(0, BLOCK_E)
    mask = is_query[:, None] & (e[None, :] < E)
    if tl.load(row + SPLITS) == 1:
        out = add_terms(
            out, lse, sink_ptr, pseudo_logit_ptr, pseudo_value_ptr, pseudo_parts, pair, h, g,
            G, E, BLOCK_E, SINKS, PSEUDO,
        )  # fmt: skip
        where = (pair * size_GW + place_GW[:, None]) * E + e[None, :]
        tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(lse_ptr + own_row, lse, mask=is_query)
        tl.store(part_ptr + own_row[:, None] * E + e[None, :], out, mask=mask)
