"""A product of few rows in Triton, one launch with what stands before and behind it.

A program owns some rows of the weight with all of their numbers: no sum crosses programs, so there are neither tickets
nor atomics, and a result depends on its own row alone. The warps of a program share what they multiply among them. One
row is multiplied in registers, up to 16 by tensor cores. Each weight is read once, a tile ahead of its use, and the
first tile before the wait for the kernel before (`chained_triton`), as no kernel writes weights.
"""

import torch
import triton
import triton.language as tl

from sfi_kernels.chained_triton import await_previous
from sfi_kernels.fused.triton import gated_numbers, rounded
from sfi_kernels.launch import KernelLimitError, launch, target
from sfi_kernels.products.reference import MOST_ROWS, check_project

# for one row, and for several: warps of a program, numbers of a row in a tile of weights, and rows that it may have.
# Of one row each thread then loads what it multiplies, 8 numbers at once; of several a warp has 32 columns or more
WARPS, WIDE, TALL = (4, 8), (1024, 256), ((4, 8), (16, 32))
LEAST_DOT = 16  # columns of a warp's product of tiles


@triton.jit
def _normed(rows_ptr, norm_ptr, row, column, scale, K: tl.constexpr, NORM: tl.constexpr):
    inside = column < K
    rows = tl.load(rows_ptr + row[:, None] * K + column, mask=inside, other=0.0)
    if NORM:
        weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        rows = (weight * rounded(rows.to(tl.float32) * scale[:, None], rows.dtype)).to(rows.dtype)
    return rows


@triton.jit
def _scale(rows_ptr, row, eps, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    # what the norm multiplies each row by
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)[None, :]
        number = tl.load(rows_ptr + row[:, None] * K + column, mask=column < K, other=0.0).to(tl.float32)
        squares += number * number
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit(do_not_specialize=["M"])
def _project_kernel(
    rows_ptr, weight_ptr, bias_ptr, norm_ptr, residual_ptr, out_ptr, M, eps, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    # of a gate and its up, one after the other in the weight, a tile has the same rows by turns
    PARTS: tl.constexpr = 2 if GATED else 1
    dtype = out_ptr.dtype.element_ty
    order, column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    number = tl.minimum(order // PARTS + order % PARTS * (N // PARTS), N - 1)  # [BLOCK_N]
    weight_ptr += number.to(tl.int64)[:, None] * K + column
    tile = tl.load(weight_ptr, mask=column < K, other=0.0)
    await_previous(CHAINED)
    row = tl.minimum(tl.arange(0, BLOCK_M), M - 1)
    scale = _scale(rows_ptr, row, eps, K, BLOCK_M, BLOCK_K) if NORM else row
    if BLOCK_M == 1:
        total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    else:
        total = tl.zeros([WARPS, BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        after = start + BLOCK_K
        ahead = tl.load(weight_ptr + after, mask=column < K - after, other=0.0)
        rows = _normed(rows_ptr, norm_ptr, row, start + column, scale, K, NORM)
        if BLOCK_M == 1:
            total += tile.to(tl.float32) * rows.to(tl.float32)
        else:
            left = tl.permute(tl.reshape(rows, BLOCK_M, WARPS, BLOCK_K // WARPS), 1, 0, 2)
            right = tl.permute(tl.reshape(tile, BLOCK_N, WARPS, BLOCK_K // WARPS), 1, 2, 0)
            total = tl.dot(left, right, total, input_precision="ieee")
        tile = ahead
    product = tl.sum(total, 1)[None, :] if BLOCK_M == 1 else tl.sum(total, 0)  # [BLOCK_M, BLOCK_N]
    if BIAS:
        product += tl.load(bias_ptr + number).to(tl.float32)[None, :]
    product = product.to(dtype)
    if GATED:
        gate, up = tl.split(tl.reshape(product, BLOCK_M, BLOCK_N // 2, 2))
        product = gated_numbers(gate.to(tl.float32), up.to(tl.float32), dtype)
    line = tl.arange(0, BLOCK_M)[:, None]
    place = tl.program_id(0) * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)[None, :]
    mask = (line < M) & (place < N // PARTS)
    place += line * (N // PARTS)
    if ADD:
        residual = tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        product = (residual + product.to(tl.float32)).to(dtype)
    tl.store(out_ptr + place, product, mask=mask)


def project(
    rows_XK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None,
    norm_K: torch.Tensor | None = None, eps: float = 0.0, residual_XN: torch.Tensor | None = None, *,
    gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See `reference.project`. Up to 16 rows."""
    out_XN = rows_XK.new_empty(check_project(rows_XK, weight_NK, bias_N, norm_K, residual_XN, gated=gated))
    N, K = weight_NK.shape
    M = rows_XK.numel() // K
    if M > MOST_ROWS:
        raise KernelLimitError(f"rows must be at most {MOST_ROWS} for the kernel, got {M}")
    tall, several = rows_of_tile(N, M, target(rows_XK.device).processors), M > 1
    warps = WARPS[several]
    wide = max(warps * LEAST_DOT * several, min(triton.next_power_of_2(K), WIDE[several]))
    launch(
        _project_kernel, (triton.cdiv(N, tall) if M else 0,), rows_XK, weight_NK,
        *(rows_XK if given is None else given for given in (bias_N, norm_K, residual_XN)), out_XN, M, eps,
        num_warps=warps, N=N, K=K, BLOCK_M=MOST_ROWS if several else 1, BLOCK_N=tall, BLOCK_K=wide, WARPS=warps,
        GATED=gated, BIAS=bias_N is not None, NORM=norm_K is not None, ADD=residual_XN is not None,
    )  # fmt: skip
    return out_XN


def rows_of_tile(N: int, M: int, processors: int) -> int:
    """Return how many of N rows of a weight a program owns that multiplies M rows.

    The busiest processor then reads the fewest rows, of the weight and of what each of its programs multiplies.
    """
    return min(TALL[M > 1], key=lambda rows: triton.cdiv(triton.cdiv(N, rows), processors) * (rows + M))
