"""A product with what stands around it, in PyTorch, with every rounding of transformers' Llama modules."""

import torch

from sfi_kernels.fused import rms_norm, silu_mul
from sfi_kernels.op import check_same, check_shapes

MOST_ROWS = 16  # that the kernel takes: those of one tile


def project(
    rows_XK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    norm_K: torch.Tensor | None = None,
    eps: float = 0.0,
    residual_XN: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Multiply rows, [..., K], by a weight; return [..., N], or [..., N / 2] if `gated`.

    With a `norm` the rows are normed before, as `rms_norm` does. The product, a bias in it, is rounded to the dtype.
    Then `gated` applies `silu_mul` to its halves, gate and up, and a `residual` of the result's shape is added. All
    tensors are contiguous, of one dtype and device; `ValueError` is raised where they or their shapes do not fit.
    """
    check_project(rows_XK, weight_NK, bias_N, norm_K, residual_XN, gated=gated)
    if norm_K is not None:
        rows_XK = rms_norm.reference(rows_XK, norm_K, eps)
    out_XN = torch.nn.functional.linear(rows_XK, weight_NK, bias_N)
    if gated:
        out_XN = silu_mul.reference(*out_XN.chunk(2, -1))
    return out_XN if residual_XN is None else residual_XN + out_XN


def check_project(
    rows_XK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, norm_K: torch.Tensor | None,
    residual_XN: torch.Tensor | None, *, gated: bool,
) -> tuple[int, ...]:  # fmt: skip
    """Raise the errors of `project`; return the result's shape."""
    check_shapes("weight NK", weight_NK, K=rows_XK.shape[-1])
    (N, K), parts = weight_NK.shape, 1 + gated
    if N % parts:
        raise ValueError(f"weight must have an even first size where it is gated, got {N}")
    shape = (*rows_XK.shape[:-1], N // parts)
    for name, size, vector in (("bias N", N, bias_N), ("norm K", K, norm_K)):
        if vector is not None:
            check_shapes(name, vector, **{name[-1]: size})
    if residual_XN is not None and residual_XN.shape != shape:
        raise ValueError(f"residual must have the result's shape, {list(shape)}, got {list(residual_XN.shape)}")
    given = {"weight": weight_NK, "bias": bias_N, "norm": norm_K, "residual": residual_XN, "rows": rows_XK}
    check_same(rows_XK, "rows", **{name: tensor for name, tensor in given.items() if tensor is not None})
    return shape
