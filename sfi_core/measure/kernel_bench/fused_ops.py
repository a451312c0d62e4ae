"""Variants of norm, rotation and gate for one token of every request; a row is as wide as all query heads."""

from collections.abc import Iterator
from functools import partial

import torch

from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.gates import share
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.rms_norm import add_rms_norm
from sfi_kernels.rotary import rotary
from sfi_kernels.silu_mul import silu_mul

EPS = 1e-6
ROUNDINGS = 4  # to the dtype: a norm, its weight, a product and a sum


def norm(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield a residual's sum and its RMS norm."""
    B, F = layer.settings.batch, layer.settings.heads * layer.settings.head_dim
    residual, hidden, weight = layer.draw(B, F), layer.draw(B, F), layer.draw(F)
    call = partial(add_rms_norm.on(layer.backend), residual, hidden, weight, EPS)

    def error() -> float:
        total, normed = call()
        summed = _error(total, residual.double() + hidden.double())
        return max(summed, _error(normed, _normed(total, weight)))

    yield KernelVariant("rms_norm", None, call, (4 * B * F + F) * layer.settings.torch_dtype.itemsize, error)


def rotation(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield the norm of a token's queries and keys, and their rotation."""
    settings = layer.settings
    B, D = settings.batch, settings.head_dim
    query, key = layer.draw(B, 1, settings.heads, D), layer.draw(B, 1, settings.kv_heads, D)
    angle, weight = layer.draw(B, 1, D // 2).repeat(1, 1, 2), layer.draw(D)
    cos, sin = angle.cos(), angle.sin()
    numbers = query.numel() + key.numel() + cos.numel() + D
    call = partial(rotary.on(layer.backend), query, key, cos, sin, weight, weight, EPS)

    def error() -> float:
        worst = 0.0
        for got, rows in zip(call(), (query, key), strict=True):
            wide = _normed(rows.transpose(1, 2), weight)
            first, second = wide.chunk(2, -1)
            along, across = wide * cos.double()[:, None], torch.cat((-second, first), -1) * sin.double()[:, None]
            worst = max(worst, _error(got, along + across, along.abs() + across.abs()))
        return worst

    yield KernelVariant("rotary", None, call, 2 * numbers * settings.torch_dtype.itemsize, error)


def gate(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield the gate of a feed-forward layer."""
    B, F = layer.settings.batch, layer.settings.heads * layer.settings.head_dim
    gate, up = layer.draw(B, F), layer.draw(B, F)
    call = partial(silu_mul.on(layer.backend), gate, up)

    def error() -> float:
        return _error(call(), gate.double() * torch.sigmoid(gate.double()) * up.double())

    yield KernelVariant("silu_mul", None, call, 3 * B * F * layer.settings.torch_dtype.itemsize, error)


def _normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = rows.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _error(got: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor | None = None) -> float:
    # half an epsilon for each rounding, and a few float32 epsilons for the sums of squares
    kind = torch.finfo(got.dtype)
    bound = ROUNDINGS * (kind.eps + 4 * torch.finfo(torch.float32).eps)
    sizes = expected.abs() if sizes is None else sizes
    return share((got.double() - expected).abs(), bound * sizes + kind.tiny)
