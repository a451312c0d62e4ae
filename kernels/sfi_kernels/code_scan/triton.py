"""Choosing keys by their codes in Triton: three launches for a whole batch, the same at every step.

The second counts the scores of the keys of J (`reference.choose_likeliest`), the third takes the best. Both read what
the first left of the logits, 16 bits each: a key whose weight lies within 0.02 % of the edge of a score may get its
neighbor, which the reference's float32 logits do not give.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sfi_kernels.attention_tile import check_width, padded
from sfi_kernels.attention_tile.triton import LN2, add_sum, log_sum
from sfi_kernels.chained_triton import await_previous
from sfi_kernels.choice import Choice
from sfi_kernels.code_scan import codes as coding
from sfi_kernels.code_scan.codes import SLOTS, BatchCodes, CodeBasis, words
from sfi_kernels.code_scan.reference import check, check_basis, check_codes
from sfi_kernels.code_scan.sums_triton import BINS, FAST, KEYS, candidates, logits_at, own_pair, weights
from sfi_kernels.code_scan.sums_triton import _code_scan_sums_kernel as sums
from sfi_kernels.code_scan.sums_triton import _encode_keys_kernel as encode
from sfi_kernels.launch import launch, target
from sfi_kernels.pages import kernel_strides
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.step_descriptor import StepDescriptor

LOGITS = 4096  # of a program: keys times query heads
MOST_KEYS = 1024  # of a program
MIN_CHUNKS = 64  # one kernel for all capacities up to 64K
RESIDENT = 4  # programs of the first launch that fit a processor
# so that they do, a thread has 128 registers, of which 16 query heads of 2 bytes would spill; left alone, it takes more
REGISTERS, MORE_REGISTERS, MANY_HEADS = 128, 168, 16
DROPPED, LOWEST = tl.constexpr(coding.DROPPED), tl.constexpr(coding.LOWEST)
COLUMNS = tl.constexpr(257)  # counts of scores at or above each one, then 0
JOINED = tl.constexpr(64)  # chunks whose sums are joined at a time


@triton.jit(do_not_specialize=["capacity", "budget"])
def _code_scan_score_kernel(
    table_ptr, below_ptr, lse_ptr, counts_ptr, chunk_ptr, score_ptr, log_sum_ptr,
    capacity, budget, H: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    pair, chunk, chunks = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    mode, first, stop = candidates(table_ptr, pair // H)
    begin = chunk * CHUNK
    if (mode != FAST) | (stop - first <= budget) | (begin >= stop) | (begin + CHUNK <= first):
        return
    slot_pair = own_pair(table_ptr, pair, H)
    g, t = tl.arange(0, BLOCK_G), begin + tl.arange(0, CHUNK)
    valid = (t >= first) & (t < stop)
    lse_ptr += pair * chunks * G
    # join the chunks' log-sum-exps
    peak, total = tl.full([BLOCK_G], float("-inf"), tl.float32), tl.zeros([BLOCK_G], tl.float32)
    for other in range(first // CHUNK, tl.cdiv(stop, CHUNK), JOINED):
        place = other + tl.arange(0, JOINED)
        mask = (g < G)[:, None] & (place < tl.cdiv(stop, CHUNK))[None, :]
        part = tl.load(lse_ptr + place[None, :] * G + g[:, None], mask=mask, other=float("-inf"))
        peak, total = add_sum(peak, total, part)
    lse = log_sum(peak, total)
    tl.store(log_sum_ptr + pair * G + g, lse, mask=g < tl.where(chunk == first // CHUNK, G, 0))
    at, mask = logits_at(slot_pair, g, t, valid, capacity, G)
    below = tl.load(below_ptr + at, mask=mask, other=0)
    part = tl.load(lse_ptr + chunk * G + g, mask=g < G, other=float("-inf"))
    weight = weights(below, part, tl.where(g < G, lse, 0.0))
    mean = tl.sum(weight, 0) / G
    score = (mean.to(tl.int32, bitcast=True) >> DROPPED) - LOWEST
    score = tl.minimum(tl.maximum(score, 0), BINS - 1)
    tl.store(score_ptr + slot_pair * capacity + t, score.to(tl.uint8), mask=valid)
    counts, bins = tl.histogram(score, BINS, mask=valid), tl.arange(0, BINS)
    chunk_ptr += (pair * chunks + chunk) * COLUMNS
    tl.store(chunk_ptr + bins, tl.cumsum(counts, reverse=True))
    tl.store(chunk_ptr + BINS, 0)
    tl.atomic_add(counts_ptr + pair * BINS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["capacity", "budget", "S"])
def _code_scan_choose_kernel(
    table_ptr, below_ptr, lse_ptr, counts_ptr, chunk_ptr, score_ptr, log_sum_ptr, index_ptr,
    position_ptr, length_ptr, rest_ptr, capacity, budget, S, rest, H: tl.constexpr, G: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    pair, chunk, chunks = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    mode, first, stop = candidates(table_ptr, pair // H)
    g, begin, count = tl.arange(0, BLOCK_G), chunk * CHUNK, stop - first
    slot_pair = own_pair(table_ptr, pair, H)
    index_ptr += pair * budget
    position_ptr += slot_pair * S
    rest_ptr += (pair * G + g) * chunks + chunk
    if (mode == FAST) & (chunk == 0):  # sinks, padding and the number of positions
        chosen = tl.minimum(tl.maximum(count, 0), budget)
        for s_begin in range(0, S, CHUNK):
            s = s_begin + tl.arange(0, CHUNK)
            tl.store(position_ptr + s, s, mask=(s < first) & (s < S))
            tl.store(position_ptr + s, -1, mask=(s >= first + chosen) & (s < S))
            tl.store(index_ptr + s, -1, mask=(s >= chosen) & (s < budget))
        tl.store(length_ptr + slot_pair, first + chosen)
    if (mode != FAST) | (count <= budget) | (begin >= stop) | (begin + CHUNK <= first):
        tl.store(rest_ptr, float("-inf"), mask=g < G)
    if (mode != FAST) | (begin >= stop) | (begin + CHUNK <= first):
        return
    t = begin + tl.arange(0, CHUNK)
    valid = (t >= first) & (t < stop)
    if count <= budget:
        tl.store(index_ptr + t - first, t, mask=valid)
        tl.store(position_ptr + t, t, mask=valid)
        return
    bins = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + pair * BINS + bins)
    pivot = tl.sum((tl.cumsum(counts, reverse=True) >= budget).to(tl.int32)) - 1
    room = budget - tl.sum(tl.where(bins > pivot, counts, 0))
    # scores above the threshold and equal to it in the chunks before this one
    other = tl.arange(0, BLOCK_CHUNKS)
    before = (other >= first // CHUNK) & (other < chunk)
    column_ptr = chunk_ptr + (pair * chunks + other) * COLUMNS + pivot
    above = tl.sum(tl.load(column_ptr + 1, mask=before, other=0))
    equal = tl.sum(tl.load(column_ptr, mask=before, other=0)) - above
    # Eq. 24
    score = tl.load(score_ptr + slot_pair * capacity + t, mask=valid, other=0).to(tl.int32)
    best, tied = valid & (score > pivot), valid & (score == pivot)
    # both counts in one scan, of 16 bits each
    each = best.to(tl.int32) + tied.to(tl.int32) * 65536
    ahead = tl.cumsum(each) - each
    taken = best | (tied & (equal + (ahead >> 16) < room))
    rank = above + (ahead & 65535) + tl.minimum(equal + (ahead >> 16), room)
    tl.store(index_ptr + rank, t, mask=taken)
    tl.store(position_ptr + first + rank, t, mask=taken)
    lse = tl.load(log_sum_ptr + pair * G + g, mask=g < G, other=0.0)
    part = tl.load(lse_ptr + (pair * chunks + chunk) * G + g, mask=g < G, other=float("-inf"))
    at, mask = logits_at(slot_pair, g, t, valid & ~taken, capacity, G)
    below = tl.load(below_ptr + at, mask=mask, other=0)
    unread = tl.sum(tl.where(mask, weights(below, part, lse), 0.0), 1) * rest
    logit = tl.where(unread > 0.0, lse + tl.log2(tl.where(unread > 0.0, unread, 1.0)) * LN2, float("-inf"))
    tl.store(rest_ptr, logit, mask=g < G)


def encode_keys(key_HTD: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    """See `reference.encode_keys`. D up to 256."""
    check_basis(key_HTD, basis)
    H, T, D = key_HTD.shape
    check_width(D)
    if key_HTD.stride(2) != 1:
        key_HTD = key_HTD.contiguous()
    W = words(D)
    word_HWT = key_HTD.new_empty(H, W, T, dtype=torch.int32)
    launch(
        encode, (triton.cdiv(T, KEYS), H), key_HTD, basis.mean_HD.contiguous(),
        basis.encode_HDC.contiguous(), word_HWT, T, key_HTD.stride(0), key_HTD.stride(1),
        W=W, D=D, BLOCK_T=KEYS, BLOCK_D=padded(D), num_warps=8,
    )  # fmt: skip
    return word_HWT


def code_tokens(
    key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes,
    query_BHGD: torch.Tensor | None = None, pseudo: PseudoToken | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """See `reference.code_tokens`. D up to 256; the pseudo token's logits may be in parts."""
    check_codes(key_PHND, block_table_BP, descriptor, codes)
    empty, keeps = codes.sum_BHE, query_BHGD is not None
    query, G = (empty, 1) if query_BHGD is None else (query_BHGD.contiguous(), query_BHGD.shape[2])
    value_PHNE = key_PHND if descriptor.new is None else descriptor.new.value_PHNE
    logit, mends = (empty, False) if pseudo is None else (pseudo.logit_BHG, True)
    _sum(
        0, query, key_PHND, value_PHNE, block_table_BP, descriptor, codes, (*[empty] * 4, codes.summed_BH, logit),
        scale, 0, G=G, BLOCK_G=triton.next_power_of_2(G), CHUNK=1, CHOOSE=False, CODES=True, KEEPS=keeps, MENDS=mends,
    )  # fmt: skip


def code_scan(
    query_BHGD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes,
    position_BHS: torch.Tensor, length_BH: torch.Tensor, *, budget: int, scale: float, rest: float,
    diagnoses: bool = False,  # noqa: ARG001 - one signature for all backends
    early: bool = False,
) -> Choice:  # fmt: skip
    """See `reference.code_scan`. D and E up to 256; the pseudo token's logits are in parts, one a chunk."""
    check(query_BHGD, key_PHND, value_PHNE, block_table_BP, descriptor, codes, position_BHS, length_BH)
    (B, H, G, _), E, (slots, _, W, capacity) = query_BHGD.shape, value_PHNE.shape[3], codes.word_BHWT.shape
    table, chunk = descriptor.table_BX, min(MOST_KEYS, LOGITS // triton.next_power_of_2(G))
    chunk //= 1 + (G >= MANY_HEADS)
    chunks, pairs = triton.cdiv(capacity, chunk), B * H

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return query_BHGD.new_empty(B, H, *shape, dtype=dtype)

    factor, lse, log_sum_BHG = empty(1 + SLOTS * W, G), empty(chunks, G), empty(G)
    # by slot: a server's batch may have many rows without one
    below_BHGT = query_BHGD.new_empty(slots, H, G, capacity, dtype=torch.uint16)
    score_BHT = query_BHGD.new_empty(slots, H, capacity, dtype=torch.uint8)
    counts, columns, index_BHK = (
        empty(*shape, dtype=torch.int32) for shape in ((BINS.value,), (chunks, COLUMNS.value), (budget,))
    )
    pseudo = PseudoToken(empty(G, chunks), empty(E))
    common = {"G": G, "BLOCK_G": triton.next_power_of_2(G), "CHUNK": chunk}
    _sum(
        chunks, query_BHGD.contiguous(), key_PHND, value_PHNE, block_table_BP, descriptor, codes,
        (pseudo.value_BHE, factor, below_BHGT, lse, counts, lse), scale, budget, **common, CHOOSE=True,
        CODES=not early, KEEPS=not early, MENDS=False,
    )  # fmt: skip
    launch(
        _code_scan_score_kernel, (chunks, pairs), table, below_BHGT, lse, counts, columns, score_BHT, log_sum_BHG,
        capacity, budget, H=H, **common,
    )  # fmt: skip
    launch(
        _code_scan_choose_kernel, (chunks, pairs), table, below_BHGT, lse, counts, columns, score_BHT, log_sum_BHG,
        index_BHK, position_BHS, length_BH, pseudo.logit_BHG, capacity, budget, position_BHS.shape[2], float(rest),
        H=H, BLOCK_CHUNKS=max(MIN_CHUNKS, triton.next_power_of_2(chunks)), **common,
    )  # fmt: skip
    return Choice(index_BHK, pseudo)


def _sum(
    chunks: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_table: torch.Tensor,
    descriptor: StepDescriptor, codes: BatchCodes, made: tuple[torch.Tensor, ...], scale: float, budget: int,
    **constants: Any,
) -> None:  # fmt: skip
    (_, H, page_size, D), E, (*_, W, capacity) = key.shape, value.shape[3], codes.word_BHWT.shape
    B = descriptor.batch
    new = descriptor.new
    rows, norm = (new[:2], new.norm_PHN) if new else ((key, value), codes.sum_BHE)
    check_width(max(D, E))
    # a program projects its query once; as many programs as fit at once share the chunks
    each = max(1, triton.cdiv(chunks * B * H, RESIDENT * target(key.device).processors))
    launch(
        sums, (1 + triton.cdiv(chunks, each), B * H), query, key, value, *rows, norm, block_table,
        descriptor.table_BX, *codes, *made, made[-1][0, 0, 0].numel(), chunks, each, scale, block_table.shape[1],
        capacity, budget,
        rows[0].shape[2], *(stride for part in rows for stride in part.stride()[:3]),
        KEY_STRIDES=kernel_strides(key, "key"), VALUE_STRIDES=kernel_strides(value, "value"), H=H, D=D, E=E, W=W,
        PAGE=page_size, BLOCK_D=padded(D), BLOCK_E=padded(E),
        APPENDS=new is not None, **constants,
        max_registers=REGISTERS if constants["BLOCK_G"] * query.itemsize < 2 * MANY_HEADS else MORE_REGISTERS,
    )  # fmt: skip
