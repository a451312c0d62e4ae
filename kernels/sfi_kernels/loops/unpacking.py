"""The numbers of a GGUF file's blocks as int8, in the order of their weights; zero points are taken off.

The layouts are ggml's: `gguf.quants` unpacks the same blocks in numpy, and is the reference.
"""

import numpy as np

from sfi_kernels.compiled import entry
from sfi_kernels.loops.vectors import inner
from sfi_kernels.tables import BLOCK, TILE

GROUPS = 8  # of 32 numbers in a block of 256


@inner
def _copy(source, to):
    for i in range(BLOCK):
        to[i] = np.int8(source[i])


@inner
def _halves(source, fifth, zero, to):
    # 16 bytes: low halves, then high ones; `fifth` has the fifth bit of each number
    for i in range(16):
        low = np.int32(source[i]) & np.int32(15) | (fifth >> np.uint32(i) & np.uint32(1)) << np.uint32(4)
        to[i] = np.int8(low - zero)
    for i in range(16):
        high = np.int32(source[i]) >> np.int32(4) | (fifth >> np.uint32(i + 16) & np.uint32(1)) << np.uint32(4)
        to[16 + i] = np.int8(high - zero)


@inner
def _group(source, shift, more, more_shift, mask, zero, to):
    # the halves of 32 bytes, with more bits of 32 others in front
    for i in range(BLOCK):
        low = source[i] >> shift & np.uint8(15)
        high = (more[i] >> more_shift & mask) << np.uint8(4)
        to[i] = np.int8(low | high) - zero


@inner
def _large(block, low, width, high, per_byte, mask, zero, to):
    # `low` is the first byte of halves, in parts of `width` bytes; `high` that of more bits, of `per_byte` numbers each
    for g in range(GROUPS):
        lines = width // BLOCK
        part, line, upper = g // (2 * lines), g % lines, g // lines % 2
        begin = low + width * part + BLOCK * line
        more = high + BLOCK * (g // per_byte)
        shift = np.uint8(GROUPS // per_byte * (g % per_byte))
        _group(
            block[begin : begin + BLOCK], np.uint8(4 * upper), block[more : more + BLOCK], shift, np.uint8(mask),
            np.int8(zero), to[BLOCK * g : BLOCK * g + BLOCK],
        )  # fmt: skip


@inner
def _word(block, at):
    word = np.uint32(0)
    for i in range(4):
        word |= np.uint32(block[at + i]) << np.uint32(8 * i)
    return word


@inner
def _unpack_row(kind, block_BX, number_I):
    for b in range(len(block_BX)):
        block = block_BX[b]
        if kind >= 12:  # noqa: PLR2004 - the K kinds
            to = number_I[256 * b : 256 * b + 256]
            if kind == 12:  # noqa: PLR2004 - Q4_K
                _large(block, 16, 32, 16, 8, 0, 0, to)
            elif kind == 13:  # noqa: PLR2004 - Q5_K
                _large(block, 48, 32, 16, 8, 1, 0, to)
            else:  # Q6_K
                _large(block, 0, 64, 128, 4, 3, 32, to)
            continue
        to = number_I[BLOCK * b : BLOCK * b + BLOCK]
        if kind == 8:  # noqa: PLR2004 - Q8_0
            _copy(block[2:], to)
        elif kind == 2:  # noqa: PLR2004 - Q4_0
            _halves(block[2:], np.uint32(0), 8, to)
        elif kind == 3:  # noqa: PLR2004 - Q4_1
            _halves(block[4:], np.uint32(0), 0, to)
        elif kind == 6:  # noqa: PLR2004 - Q5_0
            _halves(block[6:], _word(block, 2), 16, to)
        else:  # Q5_1
            _halves(block[8:], _word(block, 4), 0, to)


@inner
def _pack_pairs(number_8I, first, shift, middle, word_P16):
    # add a block of eight rows to lines, from number `first` on
    for pair in range(BLOCK // 2):
        for row in range(TILE):
            for odd in range(2):
                number = np.int16(np.int16(number_8I[row, first + 2 * pair + odd]) + middle)
                word_P16[pair, 2 * row + odd] |= number << shift


@entry
def pack_numbers(begin, end, kind, fields, block_OBX, word_TGP):
    """Add the numbers of tiles `begin` to `end` - 1 to lines [T, groups, 16, 2 * `TILE`], zeros of int8 or int16.

    `kind` is the type's number in a GGUF file; of several fields, numbers without a minimum count from the lowest on.
    """
    middle = np.int16(8 if kind == 2 else 16 if kind == 6 else 0)  # noqa: PLR2004 - Q4_0, Q5_0
    count, blocks = len(block_OBX), block_OBX.shape[1] * (GROUPS if kind >= 12 else 1)  # noqa: PLR2004 - the K kinds
    number_8I = np.zeros((TILE, blocks * BLOCK), np.int8)
    for tile in range(begin, end):
        for row in range(min(TILE, count - tile * TILE)):
            _unpack_row(kind, block_OBX[tile * TILE + row], number_8I[row])
        for b in range(blocks):
            shift = np.int16(16 // fields * (b % fields))
            _pack_pairs(number_8I, b * BLOCK, shift, middle, word_TGP[tile, b // fields])
