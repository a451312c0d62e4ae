"""Rotary positions in PyTorch, with every rounding of transformers' `apply_rotary_pos_emb`."""

import torch

from sfi_kernels.rms_norm import rms_norm
from sfi_kernels.shapes import check_pages, check_same, check_shape, row_distance

MAX_WIDTH = 256  # of the kernel


def rotary(
    query_BTXD: torch.Tensor,
    key_BTHD: torch.Tensor,
    cos_BTD: torch.Tensor,
    sin_BTD: torch.Tensor,
    query_weight_D: torch.Tensor | None = None,
    key_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm each head as `rms_norm` does, if there are weights, and rotate it (Su et al., 2021, Eq. 34).

    A head's first half is paired with its second, as in transformers; the paper pairs neighbors. Both
    products and their sum are rounded to the dtype.

    Args:
        query_BTXD: Queries as projected, the tokens at one distance. X are all query heads; D is even.
        key_BTHD: Keys, likewise.
        cos_BTD: Cosines of the positions' angles, of the same dtype; B may be 1. The last stride is 1.
        sin_BTD: Sines, with the cosines' strides.
        query_weight_D: Weight of the queries' norm; None for no norm.
        key_weight_D: Weight of the keys' norm; both or neither.
        eps: Of the norms.

    Returns:
        Queries [B, X, T, D] and keys [B, H, T, D], both as views of tensors with T before the heads.

    Raises:
        ValueError: The shapes, dtypes, devices or strides do not fit, or only one weight is given.
    """
    check(query_BTXD, key_BTHD, cos_BTD, sin_BTD, query_weight_D, key_weight_D)
    pairs = ((query_BTXD, query_weight_D), (key_BTHD, key_weight_D))
    query_BXTD, key_BHTD = (
        _rotated(
            (rows if weight_D is None else rms_norm.reference(rows, weight_D, eps)).transpose(1, 2),
            cos_BTD[:, None],
            sin_BTD[:, None],
        )
        for rows, weight_D in pairs
    )
    return query_BXTD, key_BHTD


def _rotated(head_BHTD: torch.Tensor, cos_B1TD: torch.Tensor, sin_B1TD: torch.Tensor) -> torch.Tensor:
    first, second = head_BHTD.chunk(2, dim=-1)
    return head_BHTD * cos_B1TD + torch.cat((-second, first), dim=-1) * sin_B1TD


def check(
    query_BTXD: torch.Tensor, key_BTHD: torch.Tensor, cos_BTD: torch.Tensor, sin_BTD: torch.Tensor,
    query_weight_D: torch.Tensor | None, key_weight_D: torch.Tensor | None,
) -> tuple[int, int]:  # fmt: skip
    """Raise the errors of `rotary`; return the distances of the queries' and keys' tokens."""
    check_shape(query_BTXD, "query", B=None, T=None, X=None, D=None)
    B, T, _, D = query_BTXD.shape
    check_shape(key_BTHD, "key", B=B, T=T, H=None, D=D)
    check_pages(query_BTXD, "query", key=key_BTHD)
    if D % 2:
        raise ValueError(f"query must have an even last size, got {D}")
    for name, angle_BTD in (("cos", cos_BTD), ("sin", sin_BTD)):
        check_shape(angle_BTD, name, B=B if cos_BTD.shape[0] > 1 else 1, T=T, D=D)
        if angle_BTD.dtype != query_BTXD.dtype or angle_BTD.device != query_BTXD.device:
            raise ValueError(
                f"{name} must have the dtype and device of query, got {angle_BTD.dtype} on {angle_BTD.device}"
            )
        if angle_BTD.stride() != cos_BTD.stride() or angle_BTD.stride(2) != 1:
            raise ValueError(f"{name} must have the strides of cos, the last 1, got {angle_BTD.stride()}")
    if (query_weight_D is None) != (key_weight_D is None):
        raise ValueError("query_weight and key_weight must be given together, got one")
    if query_weight_D is not None and key_weight_D is not None:
        check_shape(query_weight_D, "query_weight", D=D)
        check_shape(key_weight_D, "key_weight", D=D)
        check_same(query_BTXD, "query", query_weight=query_weight_D, key_weight=key_weight_D)
    rows = {"query": query_BTXD, "key": key_BTHD}
    query_distance, key_distance = (row_distance(own, name, own.shape[2] * D) for name, own in rows.items())
    return query_distance, key_distance
