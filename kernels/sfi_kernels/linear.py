"""Rows times a weight matrix on a CPU, in compiled loops: it reads the matrix as quickly as memory gives it."""

from typing import Any

import torch
from torch.nn.functional import linear

from sfi_kernels.compiled import by_heads
from sfi_kernels.loops import products
from sfi_kernels.matrix import BLOCK, FEW_OF_BLOCKS, IN, KIND, OUT, PIECE
from sfi_kernels.numpy_views import plain

MICROSECONDS = {0: 2.3e-4, 1: 1.2e-4, 2: 1.2e-4, BLOCK: 6e-5}  # of a weight by kind, on a Zen 3


def multiply(matrix: Any, x_RI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Return rows times a matrix of blocks, [R, O] float32; `matrix` is its row (`sfi_kernels.matrix`), with the bias.

    Up to `FEW_OF_BLOCKS` rows are multiplied by the numbers as they lie, else by pieces of the matrix that become
    float32 one after the other.
    """
    if len(x_RI) <= FEW_OF_BLOCKS:
        return multiply_few(matrix, x_RI)
    count, x_RI = int(matrix[OUT]), x_RI.detach()
    out_RO = x_RI.new_empty(len(x_RI), count)
    for start in range(0, count, PIECE):
        rows = slice(start, min(start + PIECE, count))
        bias = None if bias_O is None else bias_O.detach()[rows]
        out_RO[:, rows] = linear(x_RI, widen(matrix, torch.arange(rows.start, rows.stop)), bias)
    return out_RO


def multiply_few(matrix: Any, x_RI: torch.Tensor) -> torch.Tensor:
    """Return a few rows times a matrix of any kind, [R, O] float32, with the matrix' bias."""
    out_RO = torch.empty(len(x_RI), matrix[OUT])
    rows, out = plain(x_RI), out_RO.numpy()
    work = MICROSECONDS.get(matrix[KIND], MICROSECONDS[BLOCK]) * int(matrix[OUT] * matrix[IN]) * len(x_RI)
    by_heads(lambda begin, end: products.linear(begin, end, matrix, rows, out), int(matrix[OUT]), work)
    return out_RO


def widen(matrix: Any, row_N: torch.Tensor) -> torch.Tensor:
    """Return some rows of a matrix of blocks as float32, [N, I]; `row_N` has their numbers, int64."""
    out_NI = torch.empty(len(row_N), matrix[IN])
    row, out = row_N.numpy(), out_NI.numpy()
    work = MICROSECONDS[0] * out_NI.numel()
    by_heads(lambda begin, end: products.widen_rows(begin, end, row, matrix, out), len(row), work)
    return out_NI
