"""Choosing pages by bounds of their logits in Triton: two launches for a whole batch, the same at every step.

The threshold is found by counting, which no order of programs changes: 32 rounds, a bit of an ordered score each.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.attention_tile import check_width, padded
from sfi_kernels.attention_tile.triton import LOG2E, add_sum, log_sum, row_start, rows
from sfi_kernels.choice import Choice
from sfi_kernels.launch import launch
from sfi_kernels.page_scan.reference import LastStep, PageSummaries, check
from sfi_kernels.pages import kernel_strides
from sfi_kernels.step_descriptor import StepDescriptor

WORDS, MODE, LENGTH = (tl.constexpr(word) for word in (words.WORDS, words.MODE, words.LENGTH))
START, STOP = tl.constexpr(words.ALLOWED_START), tl.constexpr(words.ALLOWED_STOP)
FAST, QUERIES, SLOT = (tl.constexpr(word) for word in (words.FAST, words.QUERIES, words.SLOT))
TOKENS = tl.constexpr(16)  # whose extremes are taken at once
CHUNK, WIDE = 64, 256  # pages that a program scores, half as many of summaries of more bytes than `WIDE`
TILE = 1024  # pages that a program compares at once
REGISTERS = 128  # of a thread that chooses; left alone, the compiler takes 64 and spills
HEADS = 16  # query heads of a product's tile, at least
JOINED = tl.constexpr(64)  # chunks whose sums are joined at a time
LOWEST = tl.constexpr(-(2**31))  # below the key of every score
LEAST_NORM = tl.constexpr(1e-8)  # of `torch.cosine_similarity`


@triton.jit(do_not_specialize=["pages_per_request", "P"])
def _page_score_kernel(
    query_ptr, key_ptr, block_table_ptr, table_ptr, low_ptr, high_ptr, score_ptr, logit_ptr, lse_ptr, scale,
    pages_per_request, P, KEY_STRIDES: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    GROUPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pair, chunk, chunks = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    request, h, begin = pair // H, pair % H, chunk * CHUNK
    mode, length = tl.load(table_ptr + request * WORDS + MODE), tl.load(table_ptr + request * WORDS + LENGTH)
    queries = tl.load(table_ptr + request * WORDS + QUERIES)
    if EARLY:
        length -= queries
    used, slot = tl.cdiv(length, SIZE), tl.load(table_ptr + request * WORDS + SLOT).to(tl.int64)
    if (mode < FAST) | (begin >= used) | (slot < 0):
        return
    low_ptr += (slot * H + h) * P * D
    high_ptr += (slot * H + h) * P * D
    table = block_table_ptr + request * pages_per_request
    g, p, d = tl.arange(0, BLOCK_G), begin + tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    # the pages with new keys; their sizes are those of the caller, not of the cache
    changed = (length - queries) // SIZE
    for page in range(tl.maximum(begin, changed), tl.minimum(begin + CHUNK, used)):
        low, high = tl.full([BLOCK_D], float("inf"), tl.float32), tl.full([BLOCK_D], float("-inf"), tl.float32)
        stop = tl.minimum((page + 1) * SIZE, length)
        for at in range(page * SIZE, stop, TOKENS):
            t = at + tl.arange(0, TOKENS)
            valid = t < stop
            own_page = tl.load(table + t // PAGE, mask=valid, other=0)
            where = row_start(own_page, h, t % PAGE, KEY_STRIDES)
            key = rows(key_ptr, where, 1, valid, D, BLOCK_D).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(valid[:, None], key, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(valid[:, None], key, float("-inf")), 0))
        tl.store(low_ptr + page * D + d, low.to(low_ptr.dtype.element_ty), mask=d < D)
        tl.store(high_ptr + page * D + d, high.to(high_ptr.dtype.element_ty), mask=d < D)
    if mode != FAST:
        return
    tl.debug_barrier()  # other threads of the program load what these have stored
    query = rows(query_ptr + pair * G * D, g, D, g < G, D, BLOCK_D)
    nothing = tl.zeros_like(query)
    low = rows(low_ptr, p, D, p < used, D, BLOCK_D)
    high = rows(high_ptr, p, D, p < used, D, BLOCK_D)
    bound = tl.dot(tl.maximum(query, nothing), tl.trans(high), input_precision="ieee")
    bound = tl.dot(tl.minimum(query, nothing), tl.trans(low), bound, input_precision="ieee")
    valid = (g < G)[:, None] & (p < used)[None, :]
    if GROUPED:
        bound *= scale
        tl.store(logit_ptr + (pair * G + g)[:, None] * P + p[None, :], bound, mask=valid)
        peak, total = tl.full([BLOCK_G], float("-inf"), tl.float32), tl.zeros([BLOCK_G], tl.float32)
        peak, total = add_sum(peak, total, tl.where(valid, bound, float("-inf")))
        tl.store(lse_ptr + (pair * chunks + chunk) * G + g, log_sum(peak, total), mask=g < G)
    else:
        score = tl.max(tl.where(valid, bound, float("-inf")), 0)
        tl.store(score_ptr + pair * P + p, score, mask=p < used)


@triton.jit
def _pages(score_ptr, p, first, stop, SIZE: tl.constexpr):
    """Return an ordered int32 for each page's score, its first token of J, and how many it has."""
    begin = p * SIZE
    start = tl.minimum(tl.maximum(begin, first), stop)
    size = tl.minimum(tl.maximum(begin + SIZE, first), stop) - start
    bits = tl.load(score_ptr + p, mask=size > 0, other=0.0).to(tl.int32, bitcast=True)
    # two's complement of sign and magnitude; -0 becomes 0
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits), start, size


@triton.jit
def _count(score_ptr, least, first, stop, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return how many tokens of J are in pages of at least an ordered score."""
    counts = tl.zeros([TILE], tl.int32)
    for begin in range(first // SIZE, tl.cdiv(stop, SIZE), TILE):
        key, _, size = _pages(score_ptr, begin + tl.arange(0, TILE), first, stop, SIZE)
        counts += tl.where(key >= least, size, 0)
    return tl.sum(counts)


@triton.jit
def _take(
    score_ptr, index_ptr, budget, other_ptr, room, first, stop, SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write the best `budget` positions from `first` on before `stop`, then -1; and to a row of `room` again."""
    count = tl.maximum(stop - first, 0)
    K = tl.minimum(count, budget)
    pivot = tl.full([], LOWEST, tl.int32)
    if count > budget:
        pivot = tl.where(_count(score_ptr, 0, first, stop, SIZE, TILE) >= K, 0, pivot)
        for bit in range(31):
            least = pivot + (1 << (30 - bit))
            pivot = tl.where(_count(score_ptr, least, first, stop, SIZE, TILE) >= K, least, pivot)
    left, written = K - _count(score_ptr, pivot + 1, first, stop, SIZE, TILE), 0
    for begin in range(first // SIZE, tl.cdiv(stop, SIZE), TILE):
        key, start, size = _pages(score_ptr, begin + tl.arange(0, TILE), first, stop, SIZE)
        tied = tl.where(key == pivot, size, 0)
        ahead = tl.cumsum(tied) - tied
        taken = tl.where(key > pivot, size, tl.minimum(tied, tl.maximum(left - ahead, 0)))
        at, again = written + tl.cumsum(taken) - taken, tl.where(room > 0, taken, 0)
        for token in range(SIZE):
            tl.store(index_ptr + at + token, start + token, mask=token < taken)
            tl.store(other_ptr + at + token, start + token, mask=token < again)
        left -= tl.sum(tied)
        written += tl.sum(taken)
    for begin in range(K, tl.maximum(budget, room), TILE):
        s = begin + tl.arange(0, TILE)
        tl.store(index_ptr + s, -1, mask=s < budget)
        tl.store(other_ptr + s, -1, mask=s < room)


@triton.jit
def _mean_softmax(
    logit_ptr, lse_ptr, score_ptr, used, P,
    G: tl.constexpr, BLOCK_G: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the pages' scores, the mean over G of the softmax of logits, whose log-sum-exps come by chunk."""
    g = tl.arange(0, BLOCK_G)
    peak, total = tl.full([BLOCK_G], float("-inf"), tl.float32), tl.zeros([BLOCK_G], tl.float32)
    for other in range(0, tl.cdiv(used, CHUNK), JOINED):
        place = other + tl.arange(0, JOINED)
        mask = (g < G)[:, None] & (place < tl.cdiv(used, CHUNK))[None, :]
        part = tl.load(lse_ptr + place[None, :] * G + g[:, None], mask=mask, other=float("-inf"))
        peak, total = add_sum(peak, total, part)
    lse = log_sum(peak, total)
    for begin in range(0, used, TILE):
        p = begin + tl.arange(0, TILE)
        score = tl.zeros([TILE], tl.float32)
        for head in range(G):
            logit = tl.load(logit_ptr + head * P + p, mask=p < used, other=float("-inf"))
            score += tl.exp2((logit - tl.sum(tl.where(g == head, lse, 0.0))) * LOG2E)
        tl.store(score_ptr + p, score / G, mask=p < used)
    tl.debug_barrier()  # other threads of the program load what these have stored


@triton.jit
def _cosine(query_ptr, last_ptr, now_ptr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr,
            BLOCK_D: tl.constexpr):  # fmt: skip
    """Return the mean cosine of queries with the last step's, and keep the queries."""
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    query = rows(query_ptr, g, D, g < G, D, BLOCK_D)
    tl.store(now_ptr + g[:, None] * D + d[None, :], query, mask=(g < G)[:, None] & (d < D)[None, :])
    query, last = query.to(tl.float32), rows(last_ptr, g, D, g < G, D, BLOCK_D).to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(query * query, 1)), LEAST_NORM)
    norm *= tl.maximum(tl.sqrt(tl.sum(last * last, 1)), LEAST_NORM)
    return tl.sum(tl.where(g < G, tl.sum(query * last, 1) / norm, 0.0)) / G


@triton.jit(do_not_specialize=["P", "budget", "S", "recent", "diagnoses", "chunks"])
def _page_choose_kernel(
    query_ptr, table_ptr, score_ptr, logit_ptr, lse_ptr, index_ptr, position_ptr, length_ptr, last_query_ptr,
    last_index_ptr, ahead_ptr, cosine_ptr, corrected_ptr, P, chunks, budget, S, recent, tau, diagnoses,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
    GROUPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    request, h = pair // H, pair % H
    row = table_ptr + request * WORDS
    first, stop, length = tl.load(row + START), tl.load(row + STOP), tl.load(row + LENGTH)
    if tl.load(row + MODE) != FAST:
        return
    slot = tl.load(row + SLOT).to(tl.int64)
    slot_pair = slot * H + h
    score_ptr += pair * P
    index_ptr += pair * budget
    position_ptr += slot_pair * S
    K = tl.minimum(tl.maximum(stop - first, 0), budget)
    tl.store(length_ptr + slot_pair, first + K)
    for begin in range(0, first, TILE):
        s = begin + tl.arange(0, TILE)
        tl.store(position_ptr + s, s, mask=s < first)
    room = S - first
    if GROUPED:
        used = tl.cdiv(length - tl.load(row + QUERIES) if EARLY else length, SIZE)
        _mean_softmax(
            logit_ptr + pair * G * P, lse_ptr + pair * chunks * G, score_ptr, used, P, G, BLOCK_G, CHUNK, TILE,
        )  # fmt: skip
    if AHEAD:
        now, before = (slot * 2 + length % 2) * H + h, (slot * 2 + 1 - length % 2) * H + h
        cosine = _cosine(
            query_ptr + pair * G * D, last_query_ptr + before * G * D, last_query_ptr + now * G * D, G, D, BLOCK_G,
            BLOCK_D,
        )  # fmt: skip
        corrected = cosine < tau
        tl.store(cosine_ptr + pair, cosine)
        tl.store(corrected_ptr + pair, corrected.to(tl.uint8))
        if not corrected:
            last_index = last_index_ptr + before * budget
            for begin in range(0, room, TILE):
                s = begin + tl.arange(0, TILE)
                chosen = tl.load(last_index + s, mask=s < K, other=-1)
                tl.store(position_ptr + first + s, chosen, mask=s < room)
        turns = tl.where(corrected | (diagnoses != 0), 2, 1)  # the next step's choice, then perhaps this one's
        for turn in range(turns):
            is_next = turn == 0
            stops = tl.where(is_next, tl.maximum(first, length + 1 - recent), stop)
            into = tl.where(is_next, ahead_ptr + pair * budget, index_ptr)
            other = tl.where(is_next, last_index_ptr + now * budget, position_ptr + first)
            own_room = tl.where(is_next, budget, tl.where(corrected, room, 0))
            _take(score_ptr, into, budget, other, own_room, first, stops, SIZE, TILE)
    else:
        _take(score_ptr, index_ptr, budget, position_ptr + first, room, first, stop, SIZE, TILE)


def page_scan(
    query_BHGD: torch.Tensor, key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor,
    pages: PageSummaries, position_BHS: torch.Tensor, length_BH: torch.Tensor, last: LastStep | None = None, *,
    page: int, budget: int, recent: int = 0, scale: float = 1.0, tau: float = 0.0, diagnoses: bool = False,
    grouped: bool = False, early: bool = False,
) -> Choice:  # fmt: skip
    """See `reference.page_scan`. D up to 256."""
    check(query_BHGD, key_PHND, block_table_BP, descriptor, pages, position_BHS, length_BH, last, page, budget)
    (B, H, G, D), P, query, table = query_BHGD.shape, pages.low_BHPD.shape[2], query_BHGD.contiguous(), block_table_BP
    check_width(D)
    chunk = CHUNK // 2 if D * key_PHND.itemsize > WIDE else CHUNK
    chunks = triton.cdiv(P, chunk)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return query.new_empty(B, H, *shape, dtype=dtype)

    score, index_BHK = empty(P), empty(budget, dtype=torch.int32)
    logit = lse = cosine_BH = score
    ahead_BHK = corrected_BH = index_BHK
    grouped |= last is not None
    if grouped:
        logit, lse = empty(G, P), empty(chunks, G)
    if last is not None:
        cosine_BH, ahead_BHK, corrected_BH = empty(), empty(budget, dtype=torch.int32), empty(dtype=torch.bool)
    common: dict[str, Any] = {
        "H": H, "G": G, "D": D, "SIZE": page, "BLOCK_G": max(HEADS, triton.next_power_of_2(G)), "BLOCK_D": padded(D),
        "CHUNK": chunk, "GROUPED": grouped, "EARLY": early,
    }  # fmt: skip
    launch(
        _page_score_kernel, (chunks, B * H), query, key_PHND, table, descriptor.table_BX, *pages, score, logit, lse,
        float(scale), table.shape[1], P, KEY_STRIDES=kernel_strides(key_PHND, "key"), PAGE=key_PHND.shape[2], **common,
    )  # fmt: skip
    launch(
        _page_choose_kernel, (B * H,), query, descriptor.table_BX, score, logit, lse, index_BHK, position_BHS,
        length_BH, *(last or (query, index_BHK)), ahead_BHK, cosine_BH, corrected_BH.view(torch.uint8), P, chunks,
        budget, position_BHS.shape[2], recent, float(tau), int(diagnoses), TILE=TILE,
        AHEAD=last is not None, num_warps=8, max_registers=REGISTERS, **common,
    )  # fmt: skip
    if last is None:
        return Choice(index_BHK)
    return Choice(index_BHK, None, {"query_cosine": cosine_BH} if diagnoses else {}, corrected_BH, ahead_BHK)
