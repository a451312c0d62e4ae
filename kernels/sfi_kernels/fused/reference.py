"""What else a layer computes for a token, in PyTorch, with every rounding of transformers' Llama modules.

`ValueError` is raised where shapes, dtypes, devices or strides do not fit.
"""

from typing import NamedTuple

import torch

from sfi_kernels.op import check_pages, check_same, check_shapes, row_distance
from sfi_kernels.pack import append
from sfi_kernels.pack.reference import check_append

MAX_ROW, MAX_HEAD = 16384, 256  # widths of the norm's rows and of the rotation's heads that the kernels take


class Appending(NamedTuple):
    """New values, [B, T, H, E] as projected, and where `append` writes them and the keys: its other operands."""

    value_BTHE: torch.Tensor
    start_B: torch.Tensor
    count_B: torch.Tensor
    key_PHND: torch.Tensor
    value_PHNE: torch.Tensor
    norm_PHN: torch.Tensor
    block_table_BP: torch.Tensor


def rms_norm(hidden_XF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide rows by their root mean square and multiply by a weight (Zhang and Sennrich, 2019).

    Rows, [..., F], are contiguous; `eps` is added to the mean square. The quotient is float32 (float64 of float64
    rows), rounded to the rows' dtype, which is the weight's too, before the product.
    """
    check_norm(hidden_XF, weight_F)
    wide_XF = hidden_XF.to(torch.promote_types(hidden_XF.dtype, torch.float32))
    mean_X1 = wide_XF.square().mean(-1, keepdim=True)
    return weight_F * (wide_XF * torch.rsqrt(mean_X1 + eps)).to(hidden_XF.dtype)


def add_rms_norm(
    residual_XF: torch.Tensor, hidden_XF: torch.Tensor, weight_F: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add rows to the residual stream; return the sum, rounded to the dtype, and that sum's `rms_norm`."""
    check_norm(hidden_XF, weight_F, residual_XF)
    sum_XF = residual_XF + hidden_XF
    return sum_XF, rms_norm(sum_XF, weight_F, eps)


def check_norm(hidden_XF: torch.Tensor, weight_F: torch.Tensor, residual_XF: torch.Tensor | None = None) -> None:
    """Raise the errors of `rms_norm`, or with a residual those of `add_rms_norm`."""
    check_shapes("weight F", weight_F, F=hidden_XF.shape[-1])
    check_same(hidden_XF, "hidden", weight=weight_F, hidden=hidden_XF)
    if residual_XF is not None:
        check_same(hidden_XF, "hidden", residual=residual_XF)
        if residual_XF.shape != hidden_XF.shape:
            raise ValueError(
                f"residual must have the shape of hidden, {list(hidden_XF.shape)}, got {list(residual_XF.shape)}"
            )


def rotary(
    query_BTXD: torch.Tensor,
    key_BTHD: torch.Tensor,
    cos_BTD: torch.Tensor,
    sin_BTD: torch.Tensor,
    query_weight_D: torch.Tensor | None = None,
    key_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    appending: Appending | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm each head as `rms_norm` does, if there are weights, and rotate it (Su et al., 2021, Eq. 34).

    A head's first half is paired with its second, as in transformers; the paper pairs neighbors. Both
    products and their sum are rounded to the dtype.

    Queries and keys are as projected, the tokens at one distance; X are all query heads, D is even. Cosines and sines
    of the positions' angles have the same dtype and equal strides, the last 1; B may be 1. Both weights come, or none.
    Return queries [B, X, T, D] and keys [B, H, T, D], both as views of tensors with T before the heads. The keys and
    the values of `appending` are written to pages, too, as `append` does.
    """
    check_rotation(query_BTXD, key_BTHD, cos_BTD, sin_BTD, query_weight_D, key_weight_D, appending)
    turned = []
    for rows, weight_D in ((query_BTXD, query_weight_D), (key_BTHD, key_weight_D)):
        head_BHTD = (rows if weight_D is None else rms_norm(rows, weight_D, eps)).transpose(1, 2)
        first, second = head_BHTD.chunk(2, dim=-1)
        turned.append(head_BHTD * cos_BTD[:, None] + torch.cat((-second, first), dim=-1) * sin_BTD[:, None])
    if appending is not None:
        append.reference(turned[1], appending.value_BTHE.transpose(1, 2), *appending[1:])
    return turned[0], turned[1]


def check_rotation(
    query_BTXD: torch.Tensor, key_BTHD: torch.Tensor, cos_BTD: torch.Tensor, sin_BTD: torch.Tensor,
    query_weight_D: torch.Tensor | None, key_weight_D: torch.Tensor | None, appending: Appending | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Raise the errors of `rotary`; return the distances of the queries' and keys' tokens."""
    check_shapes("query BTXD, key BTHD", query_BTXD, key_BTHD)
    B, T, X, D = query_BTXD.shape
    check_pages(query_BTXD, "query", key=key_BTHD)
    if D % 2:
        raise ValueError(f"query must have an even last size, got {D}")
    for name, angle_BTD in (("cos", cos_BTD), ("sin", sin_BTD)):
        check_shapes(f"{name} BTD", angle_BTD, B=B if cos_BTD.shape[0] > 1 else 1, T=T, D=D)
        if angle_BTD.dtype != query_BTXD.dtype or angle_BTD.device != query_BTXD.device:
            raise ValueError(
                f"{name} must have the dtype and device of query, got {angle_BTD.dtype} on {angle_BTD.device}"
            )
        if angle_BTD.stride() != cos_BTD.stride() or angle_BTD.stride(2) != 1:
            raise ValueError(f"{name} must have the strides of cos, the last 1, got {angle_BTD.stride()}")
    if (query_weight_D is None) != (key_weight_D is None):
        raise ValueError("query_weight and key_weight must be given together, got one")
    if query_weight_D is not None and key_weight_D is not None:
        check_shapes("query_weight D, key_weight D", query_weight_D, key_weight_D, D=D)
        check_same(query_BTXD, "query", query_weight=query_weight_D, key_weight=key_weight_D)
    if appending is not None:
        check_append(key_BTHD.transpose(1, 2), appending.value_BTHE.transpose(1, 2), *appending[1:])
    return row_distance(query_BTXD, "query", X * D), row_distance(key_BTHD, "key", key_BTHD.shape[2] * D)


def silu_mul(gate_XF: torch.Tensor, up_XF: torch.Tensor) -> torch.Tensor:
    """Multiply SiLU(gate) = gate / (1 + exp(-gate)) by up (Shazeer, 2020, Eq. 6).

    Both are of one shape and dtype, their rows, [..., F], at one distance. SiLU is float32, rounded to that dtype
    before the product.
    """
    check_gate(gate_XF, up_XF)
    return torch.nn.functional.silu(gate_XF) * up_XF


def check_gate(gate_XF: torch.Tensor, up_XF: torch.Tensor) -> tuple[int, int]:
    """Raise the errors of `silu_mul`; return the distances of the rows."""
    check_pages(gate_XF, "gate", up=up_XF)
    if up_XF.shape != gate_XF.shape:
        raise ValueError(f"up must have the shape of gate, {list(gate_XF.shape)}, got {list(up_XF.shape)}")
    F = gate_XF.shape[-1]
    return row_distance(gate_XF, "gate", F), row_distance(up_XF, "up", F)
