"""The launch that codes the keys of a prompt, and how a key becomes words."""

import triton
import triton.language as tl

from sfi_kernels.attention_tile.triton import rows
from sfi_kernels.code_scan import codes

BITS, SHIFTS = tl.constexpr(codes.BITS), tl.constexpr(codes.SHIFTS)
SLOTS = tl.constexpr(codes.SLOTS)
KEYS = 64  # of a program


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
    own = t < T
    key = rows(key_ptr + h * head_stride, t.to(tl.int64), token_stride, own, D, BLOCK_D)
    mean = tl.load(mean_ptr + h * D + d, mask=d < D, other=0.0)
    centered = key.to(tl.float32) - mean[None, :]
    half, shift = fields()
    basis_ptr += (h * D + d[:, None]) * (SLOTS * W) + s[None, :] * W
    for w in range(W):
        basis = tl.load(basis_ptr + w, mask=d[:, None] < D, other=0.0)
        tl.store(word_ptr + (h * W + w) * T + t, coded(centered, basis, half, shift), mask=own)
