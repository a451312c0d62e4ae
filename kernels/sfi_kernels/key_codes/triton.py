"""Key codes in Triton: words, one launch to code keys and one to score them.

Each program of the scan projects the query itself: C sums over D cost less than a launch.
"""

import torch
import triton
import triton.language as tl

from sfi_kernels.attention_tile.shape import check_width, padded
from sfi_kernels.attention_tile.triton import rows
from sfi_kernels.key_codes import layout
from sfi_kernels.key_codes.reference import check, choose_by
from sfi_kernels.launch import launch
from sfi_kernels.shapes import check_int32, check_shape
from sfi_kernels.top_k import top_k

BITS, SHIFTS = tl.constexpr(layout.BITS), tl.constexpr(layout.SHIFTS)
SLOTS = tl.constexpr(layout.SLOTS)
KEYS = 64  # of a program that codes
TOKENS = 512  # of a program that scores
GROUP = 16  # query heads of a program that scores, at most
FOUR_WARPS = 192  # the widest head whose scan spills nothing with four warps on sm_80, 90 and 100


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


@triton.jit(do_not_specialize=["T", "head_stride", "word_stride"])
def _scan_codes_kernel(
    query_ptr, word_ptr, mean_ptr, basis_ptr, logits_ptr, scale, T, head_stride, word_stride,
    basis_head, basis_width, basis_channel,
    W: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    g, d = tl.program_id(2) * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    query = rows(query_ptr + h * G * D, g, D, g < G, D, BLOCK_D).to(tl.float32) * scale
    mean = tl.load(mean_ptr + h * D + d, mask=d < D, other=0.0)
    logits = tl.sum(query * mean[None, :], 1)[:, None] + tl.zeros([BLOCK_G, BLOCK_T], tl.float32)
    basis_ptr += h * basis_head + d * basis_width
    for w in range(W):
        word = tl.load(word_ptr + h * head_stride + w * word_stride + t, mask=t < T, other=0)
        for i in tl.static_range(SLOTS):
            basis = tl.load(basis_ptr + (i * W + w) * basis_channel, mask=d < D, other=0.0)
            channel = tl.sum(query * basis[None, :], 1)
            level = ((word >> SHIFTS[i]) & (2 ** BITS[i] - 1)).to(tl.float32)
            middle = level + (0.5 - 2.0 ** (BITS[i] - 1))
            logits += channel[:, None] * middle[None, :]
    where = logits_ptr + (h * G + g[:, None]) * T + t[None, :]
    tl.store(where, logits, mask=(g[:, None] < G) & (t[None, :] < T))


def encode_keys(key_HTD: torch.Tensor, basis: layout.CodeBasis) -> torch.Tensor:
    """See `reference.encode_keys`; returns word_HWT. D up to 256."""
    check(key_HTD, basis)
    H, T, D = key_HTD.shape
    check_width(D)
    if key_HTD.stride(2) != 1:
        key_HTD = key_HTD.contiguous()
    W = layout.words(D)
    word_HWT = key_HTD.new_empty(H, W, T, dtype=torch.int32)
    launch(
        _encode_keys_kernel, (triton.cdiv(T, KEYS), H), key_HTD, basis.mean_HD.contiguous(),
        basis.encode_HDC.contiguous(), word_HWT, T, key_HTD.stride(0), key_HTD.stride(1),
        W=W, D=D, BLOCK_T=KEYS, BLOCK_D=padded(D), num_warps=8,
    )  # fmt: skip
    return word_HWT


def scan_codes(
    query_HGD: torch.Tensor, code_HXT: torch.Tensor, basis: layout.CodeBasis, *, scale: float
) -> torch.Tensor:
    """See `reference.scan_codes`; the codes are word_HWT, with any strides of H and W. D up to 256."""
    check(query_HGD, basis)
    H, G, D = query_HGD.shape
    check_width(D)
    W = layout.words(D)
    check_shape(code_HXT, "words", H=H, W=W, T=None)
    check_int32(query_HGD.device, words=code_HXT[0, 0])
    T, block = code_HXT.shape[2], min(GROUP, triton.next_power_of_2(G))
    logits_HGT = query_HGD.new_empty(H, G, T, dtype=torch.float32)
    launch(
        _scan_codes_kernel, (triton.cdiv(T, TOKENS), H, triton.cdiv(G, block)),
        query_HGD.contiguous(), code_HXT, basis.mean_HD.contiguous(), basis.query_HDC,
        logits_HGT, scale, T, code_HXT.stride(0), code_HXT.stride(1), *basis.query_HDC.stride(),
        W=W, G=G, D=D, BLOCK_G=block, BLOCK_T=TOKENS, BLOCK_D=padded(D),
        num_warps=4 if D <= FOUR_WARPS else 8,
    )  # fmt: skip
    return logits_HGT


def choose_likeliest(logits_HGT: torch.Tensor, budget: int, *, rest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.choose_likeliest`."""
    return choose_by(top_k.triton, logits_HGT, budget, rest)
