"""One chunk of codes: its logits, for all queries of a KV head, in registers."""

import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.key_codes import layout

BITS, SHIFTS = tl.constexpr(layout.BITS), tl.constexpr(layout.SHIFTS)
SLOTS = tl.constexpr(layout.SLOTS)
# a float32's mantissa, and the number one; by how many bits the upper slots are moved down
MANTISSA, ONE, LIFT = 23, tl.constexpr(0x3F800000), 9
LOW = tuple(shift + bits < MANTISSA for shift, bits in zip(layout.SHIFTS, layout.BITS, strict=True))
PLACES = tuple(shift + 1 if low else shift - LIFT for shift, low in zip(layout.SHIFTS, LOW, strict=True))
UNITS = tl.constexpr(tuple(2.0 ** (place - MANTISSA) for place in PLACES))
LOW, PLACES, LIFT = tl.constexpr(LOW), tl.constexpr(PLACES), tl.constexpr(LIFT)
WORDS, MODE = tl.constexpr(words.WORDS), tl.constexpr(words.MODE)
START = tl.constexpr(words.ALLOWED_START)
STOP = tl.constexpr(words.ALLOWED_STOP)


@triton.jit
def candidates(table_ptr, request):
    """Return the mode, the first position of J, and one past its last."""
    row = table_ptr + request * WORDS
    return tl.load(row + MODE), tl.load(row + START), tl.load(row + STOP)


@triton.jit
def chunk_logits(
    factor_ptr, word_ptr, t, own, capacity, g,
    W: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the logits of a chunk, [BLOCK_G, CHUNK], from the factors of its channels, [1 + 16 W, G].

    The first factor is the constant; the others are divided by `UNITS`. The bits of a level become a part of
    the mantissa of a number from 1 to 2, so that the level is a float32 after two operations in place of four.
    """
    constant = tl.load(factor_ptr + g, mask=g < G, other=0.0)
    logits = constant[:, None] + tl.zeros([BLOCK_G, CHUNK], tl.float32)
    for w in range(W):
        word = tl.load(word_ptr + w * capacity + t, mask=own, other=0)
        low, high = word << 1, word >> LIFT
        for slot in tl.static_range(SLOTS):
            at = factor_ptr + (1 + w * SLOTS + slot) * G + g
            factor = tl.load(at, mask=g < G, other=0.0)
            bits = (low if LOW[slot] else high) & ((2 ** BITS[slot] - 1) << PLACES[slot])
            middle = (bits | ONE).to(tl.float32, bitcast=True) - (1 + (2.0 ** (BITS[slot] - 1) - 0.5) * UNITS[slot])
            logits += factor[:, None] * middle[None, :]
    return logits
