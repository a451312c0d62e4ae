"""How keys become words, in the launch that codes a prompt's, and in the first one of a choice.

Of that, a KV head's first program appends and codes the new keys, which J has not, and adds values to the sum over J.
The others take chunks of J, and leave each chunk's log-sum-exp for every query head, and how far the logits are
below it, in `FINE`ths of a halving: 16 bits, which know a weight to within 0.02 %. A score keeps an eighth of it.
"""

import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.attention_tile.triton import LOG2E, add_sum, log_sum, row_start, rows
from sfi_kernels.chained_triton import await_previous
from sfi_kernels.code_scan import codes
from sfi_kernels.pack.triton import append_rows

BITS, SHIFTS = tl.constexpr(codes.BITS), tl.constexpr(codes.SHIFTS)
SLOTS = tl.constexpr(codes.SLOTS)
# a float32's mantissa, and the number one; by how many bits the upper slots are moved down
MANTISSA, ONE, LIFT = 23, tl.constexpr(0x3F800000), 9
LOW = tuple(shift + bits < MANTISSA for shift, bits in zip(codes.SHIFTS, codes.BITS, strict=True))
PLACES = tuple(shift + 1 if low else shift - LIFT for shift, low in zip(codes.SHIFTS, LOW, strict=True))
UNITS = tl.constexpr(tuple(2.0 ** (place - MANTISSA) for place in PLACES))
LOW, PLACES, LIFT = tl.constexpr(LOW), tl.constexpr(PLACES), tl.constexpr(LIFT)
WORDS, MODE, SLOT = (tl.constexpr(word) for word in (words.WORDS, words.MODE, words.SLOT))
START, STOP = tl.constexpr(words.ALLOWED_START), tl.constexpr(words.ALLOWED_STOP)
FAST, LENGTH, QUERIES = (tl.constexpr(word) for word in (words.FAST, words.LENGTH, words.QUERIES))
TOKENS = tl.constexpr(16)  # that are coded, or whose values are added, at once
BINS = tl.constexpr(256)
KEPT = tl.constexpr(codes.KEPT)
FINE, DEEPEST = tl.constexpr(2048), tl.constexpr(65535.0)  # 32 halvings, as deep as a score is
KEYS = 64  # of a program that codes a prompt


@triton.jit
def fields():
    """Return 2^(bits - 1) and the first bit of a word's slots, [SLOTS]."""
    s = tl.arange(0, SLOTS)
    half, shift = tl.zeros([SLOTS], tl.float32), tl.zeros([SLOTS], tl.int32)
    for i in tl.static_range(SLOTS):
        half = tl.where(s == i, 2.0 ** (BITS[i] - 1), half)
        shift = tl.where(s == i, SHIFTS[i], shift)
    return half, shift


@triton.jit
def coded(centered, basis, half, shift):
    """Return a word of each key, from the projections of its channels."""
    # full products: TF32 would move a key across a level's edge
    level = tl.floor(tl.dot(centered, basis, input_precision="ieee")) + half[None, :]
    level = tl.minimum(tl.maximum(level, 0.0), 2.0 * half[None, :] - 1.0)
    # the slots share no bit, so that their sum is their union
    return tl.sum(level.to(tl.int32) << shift[None, :], 1)


@triton.jit(do_not_specialize=["T", "head_stride", "token_stride"])
def _encode_keys_kernel(
    key_ptr, mean_ptr, basis_ptr, word_ptr, T, head_stride, token_stride,
    W: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    s, d = tl.arange(0, SLOTS), tl.arange(0, BLOCK_D)
    valid = t < T
    key = rows(key_ptr + h * head_stride, t.to(tl.int64), token_stride, valid, D, BLOCK_D)
    mean = tl.load(mean_ptr + h * D + d, mask=d < D, other=0.0)
    centered = key.to(tl.float32) - mean[None, :]
    half, shift = fields()
    basis_ptr += (h * D + d[:, None]) * (SLOTS * W) + s[None, :] * W
    for w in range(W):
        basis = tl.load(basis_ptr + w, mask=d[:, None] < D, other=0.0)
        tl.store(word_ptr + (h * W + w) * T + t, coded(centered, basis, half, shift), mask=valid)


@triton.jit
def candidates(table_ptr, request):
    """Return the mode, the first position of J, and one past its last."""
    row = table_ptr + request * WORDS
    return tl.load(row + MODE), tl.load(row + START), tl.load(row + STOP)


@triton.jit
def own_pair(table_ptr, pair, H: tl.constexpr):
    """Return the place of a request's KV head in what is kept, -1 or less of a request without a slot."""
    return tl.load(table_ptr + pair // H * WORDS + SLOT).to(tl.int64) * H + pair % H


@triton.jit
def weights(below, chunk_lse, lse):
    """Return the weights, [BLOCK_G, BLOCK], that are so far below a chunk's log-sum-exp, of all log-sum-exps."""
    return tl.exp2(((chunk_lse - lse) * LOG2E)[:, None] - below.to(tl.float32) / FINE)


@triton.jit
def logits_at(pair, g, t, valid, capacity, G: tl.constexpr):
    """Return where the logits at `t` lie among [slots, H, G, capacity], and which there are, [BLOCK_G, BLOCK]."""
    return (pair * G + g)[:, None] * capacity + t[None, :], (g < G)[:, None] & valid[None, :]


@triton.jit
def chunk_logits(
    factor_ptr, word_ptr, t, valid, capacity, g,
    W: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the logits of a chunk, [BLOCK_G, CHUNK], from the factors of its channels, [1 + 16 W, G].

    The first factor is the constant; the others are divided by `UNITS`. The bits of a level become a part of
    the mantissa of a number from 1 to 2, so that the level is a float32 after two operations in place of four.
    """
    constant = tl.load(factor_ptr + g, mask=g < G, other=0.0)
    logits = constant[:, None] + tl.zeros([BLOCK_G, CHUNK], tl.float32)
    for w in range(W):
        word = tl.load(word_ptr + w * capacity + t, mask=valid, other=0)
        low, high = word << 1, word >> LIFT
        for slot in tl.static_range(SLOTS):
            at = factor_ptr + (1 + w * SLOTS + slot) * G + g
            factor = tl.load(at, mask=g < G, other=0.0)
            bits = (low if LOW[slot] else high) & ((2 ** BITS[slot] - 1) << PLACES[slot])
            middle = (bits | ONE).to(tl.float32, bitcast=True) - (1 + (2.0 ** (BITS[slot] - 1) - 0.5) * UNITS[slot])
            logits += factor[:, None] * middle[None, :]
    return logits


@triton.jit
def _token_rows(
    pages_ptr, table, t, valid, h, PAGE: tl.constexpr, STRIDES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    page = tl.load(table + t // PAGE, mask=valid, other=0)
    where = row_start(page, h, t % PAGE, STRIDES)
    return rows(pages_ptr, where, 1, valid, WIDTH, BLOCK).to(tl.float32)


@triton.jit
def _project(
    query_ptr, mean_ptr, basis_ptr, factor_ptr, scale,
    W: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Store the factors of the channels for `chunk_logits`; all programs of a head store the same.

    An early query's logits, of a choice that codes nothing, lack the mean key's.
    """
    d, slot = tl.arange(0, BLOCK_D), tl.arange(0, SLOTS)
    unit = tl.zeros([SLOTS], tl.float32)
    for i in tl.static_range(SLOTS):
        unit = tl.where(slot == i, 1.0 / UNITS[i], unit)
    mean = tl.load(mean_ptr + d, mask=d < D, other=0.0)
    for w in tl.static_range(W):
        basis = rows(basis_ptr, slot + w * SLOTS, D, slot < SLOTS, D, BLOCK_D)
        for g in range(G):  # these sums take less time than a float32 product of tiles
            query = tl.load(query_ptr + g * D + d, mask=d < D, other=0.0).to(tl.float32) * scale
            if w == 0:
                tl.store(factor_ptr + g, tl.sum(query * mean) if CODES else 0.0)
            factor = tl.sum(basis * query[None, :], 1) * unit
            tl.store(factor_ptr + (slot + w * SLOTS + 1) * G + g, factor)
    tl.debug_barrier()  # other threads of the program load what these have stored


@triton.jit(do_not_specialize=["parts", "chunks", "each", "pages_per_request", "capacity", "budget", "T"])
def _code_scan_sums_kernel(
    query_ptr, key_ptr, value_ptr, new_key_ptr, new_value_ptr, norm_ptr, block_table_ptr, table_ptr,
    mean_ptr, encode_ptr, basis_ptr, word_ptr, sum_ptr, summed_ptr, recent_ptr, mean_value_ptr, factor_ptr,
    below_ptr, lse_ptr, counts_ptr, pseudo_ptr, parts, chunks, each, scale, pages_per_request, capacity, budget, T,
    key_batch_stride, key_head_stride, key_token_stride,
    value_batch_stride, value_head_stride, value_token_stride,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr, CHOOSE: tl.constexpr, APPENDS: tl.constexpr, CODES: tl.constexpr, KEEPS: tl.constexpr,
    MENDS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    pair, program = tl.program_id(1).to(tl.int64), tl.program_id(0) - 1
    request, h = pair // H, pair % H
    mode, first, stop = candidates(table_ptr, request)
    table = block_table_ptr + request * pages_per_request
    slot_pair = own_pair(table_ptr, pair, H)
    kept_pair = tl.maximum(slot_pair, 0)
    word_ptr += kept_pair * W * capacity
    mean_ptr += kept_pair * D
    if program < 0:
        length = tl.load(table_ptr + request * WORDS + LENGTH)
        d, e, slot = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, SLOTS)
        if (mode >= FAST) & CODES:  # code the new keys, the last of T if they are appended first
            half, shift = fields()
            coded_stop = tl.where(slot_pair >= 0, length, 0)
            mean = tl.load(mean_ptr + d, mask=d < D, other=0.0)
            for begin in range(length - tl.load(table_ptr + request * WORDS + QUERIES), length, TOKENS):
                t = begin + tl.arange(0, TOKENS)
                valid = t < length
                if APPENDS:
                    key = append_rows(
                        new_key_ptr + request * key_batch_stride + h * key_head_stride,
                        new_value_ptr + request * value_batch_stride + h * value_head_stride, key_ptr, value_ptr,
                        norm_ptr, tl.load(table + t // PAGE, mask=valid, other=0), t % PAGE, h,
                        (T - length + t).to(tl.int64), valid, H, PAGE, key_token_stride, value_token_stride,
                        KEY_STRIDES, VALUE_STRIDES, D, E, BLOCK_D, BLOCK_E,
                    )  # fmt: skip
                else:
                    key = _token_rows(key_ptr, table, t, valid, h, PAGE, KEY_STRIDES, D, BLOCK_D)
                for w in range(W):
                    where = encode_ptr + ((kept_pair * W + w) * D + d[:, None]) * SLOTS + slot[None, :]
                    encode = tl.load(where, mask=d[:, None] < D, other=0.0)
                    tl.store(
                        word_ptr + w * capacity + t,
                        coded(key - mean[None, :], encode, half, shift),
                        mask=t < coded_stop,
                    )
        if CHOOSE:
            tl.store(counts_ptr + pair * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
            if mode == FAST:
                # add the values up to `stop` to the sum, and store the mean value of J
                known = tl.load(summed_ptr + kept_pair)
                total = tl.load(sum_ptr + kept_pair * E + e, mask=e < tl.where(known > 0, E, 0), other=0.0)
                begin = tl.where(known > 0, known, first)
                for at in range(begin, stop, TOKENS):
                    t = at + tl.arange(0, TOKENS)
                    value = _token_rows(value_ptr, table, t, t < stop, h, PAGE, VALUE_STRIDES, E, BLOCK_E)
                    total += tl.sum(value, 0)
                end = tl.maximum(begin, stop)
                tl.store(sum_ptr + kept_pair * E + e, total, mask=e < E)
                tl.store(summed_ptr + kept_pair, end)
                mean_value = total / tl.maximum(end - first, 1).to(tl.float32)
                tl.store(mean_value_ptr + pair * E + e, mean_value, mask=e < E)
        if KEEPS:
            g = tl.arange(0, BLOCK_G)
            query = rows(query_ptr + pair * G * D, g, D, g < G, D, BLOCK_D)
            where = (kept_pair * KEPT + (length - 1) % KEPT) * G + g[:, None]
            valid = (g[:, None] < tl.where(mode == FAST, G, 0)) & (d[None, :] < D)
            tl.store(recent_ptr + where * D + d[None, :], query, mask=valid)
            if MENDS:
                mean_key = tl.load(mean_ptr + d, mask=d < D, other=0.0)
                logit = tl.sum(query.to(tl.float32) * mean_key[None, :], 1) * scale
                for begin in range(0, parts, TOKENS):
                    part = begin + tl.arange(0, TOKENS)
                    at = pseudo_ptr + (pair * G + g[:, None]) * parts + part[None, :]
                    inside = (g[:, None] < tl.where(mode == FAST, G, 0)) & (part[None, :] < parts)
                    tl.store(at, tl.load(at, mask=inside, other=0.0) + logit[:, None], mask=inside)
        return
    chunk, stop_chunk = program * each, tl.minimum((program + 1) * each, tl.cdiv(stop, CHUNK))
    chunk = tl.maximum(chunk, first // CHUNK)
    if (mode != FAST) | (stop - first <= budget) | (chunk >= stop_chunk):
        return
    g = tl.arange(0, BLOCK_G)
    factor_ptr += pair * (1 + W * SLOTS) * G
    query_ptr += pair * G * D
    basis_ptr += kept_pair * W * SLOTS * D
    _project(query_ptr, mean_ptr, basis_ptr, factor_ptr, scale, W, G, D, BLOCK_D, CODES)
    for own_chunk in range(chunk, stop_chunk):
        t = own_chunk * CHUNK + tl.arange(0, CHUNK)
        valid = (t >= first) & (t < stop)
        logits = chunk_logits(factor_ptr, word_ptr, t, valid, capacity, g, W, G, BLOCK_G, CHUNK)
        nothing = tl.full([BLOCK_G], float("-inf"), tl.float32)
        in_J = tl.where(valid[None, :], logits, float("-inf"))
        peak, total = add_sum(nothing, tl.zeros([BLOCK_G], tl.float32), in_J)
        lse = log_sum(peak, total)
        tl.store(lse_ptr + (pair * chunks + own_chunk) * G + g, lse, mask=g < G)
        below = tl.minimum((lse[:, None] - in_J) * (LOG2E * FINE), DEEPEST)
        at, mask = logits_at(kept_pair, g, t, valid, capacity, G)
        tl.store(below_ptr + at, (below + 0.5).to(tl.int32).to(tl.uint16), mask=mask)
