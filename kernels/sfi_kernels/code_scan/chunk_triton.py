"""One chunk of codes: its logits, for all queries of a KV head, in registers."""

import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.key_codes import layout

BITS, SHIFTS = tl.constexpr(layout.BITS), tl.constexpr(layout.SHIFTS)
SLOTS = tl.constexpr(layout.SLOTS)
WORDS, MODE = tl.constexpr(words.WORDS), tl.constexpr(words.MODE)
START = tl.constexpr(words.ALLOWED_START)
STOP = tl.constexpr(words.ALLOWED_STOP)


@triton.jit
def candidates(table_ptr, request):
    """Return the mode, the first position of J, and one past its last."""
    row = table_ptr + request * WORDS
    return tl.load(row + MODE), tl.load(row + START), tl.load(row + STOP)


@triton.jit
def middles(word, slot: tl.constexpr):
    """Return the middles of a slot's levels, in steps, [CHUNK]."""
    level = ((word >> SHIFTS[slot]) & (2 ** BITS[slot] - 1)).to(tl.float32)
    return level + (0.5 - 2.0 ** (BITS[slot] - 1))


@triton.jit
def chunk_logits(
    factor_ptr, word_ptr, t, own, capacity, g,
    W: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the logits of a chunk, [BLOCK_G, CHUNK], from the factors of its channels, [1 + 16 W, G].

    The first factor is the constant.
    """
    constant = tl.load(factor_ptr + g, mask=g < G, other=0.0)
    logits = constant[:, None] + tl.zeros([BLOCK_G, CHUNK], tl.float32)
    for w in range(W):
        word = tl.load(word_ptr + w * capacity + t, mask=own, other=0)
        for slot in tl.static_range(SLOTS):
            at = factor_ptr + (1 + w * SLOTS + slot) * G + g
            factor = tl.load(at, mask=g < G, other=0.0)
            logits += factor[:, None] * middles(word, slot)[None, :]
    return logits
