"""Variants of norm, rotation and gate: the ops of a decoding step besides products and attention."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sfi_core.measure.kernel_bench.gates import share
from sfi_core.measure.kernel_bench.settings import FUSED_OPS, KernelSettings
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.rms_norm import add_rms_norm
from sfi_kernels.rotary import rotary
from sfi_kernels.silu_mul import silu_mul

EPS = 1e-6
ROUNDINGS = 4  # to the dtype: a norm, its weight, a product and a sum


def fused_variants(settings: KernelSettings, backend: str, device: torch.device) -> Iterator[KernelVariant]:
    """Yield the variants for one token of every request; a row is as wide as all query heads."""
    made = {"rms_norm": _norm, "rotary": _rotation, "silu_mul": _gate}
    generator = torch.Generator(device).manual_seed(settings.seed + 3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=settings.torch_dtype)

    for name in FUSED_OPS:
        if name in settings.ops:
            call, numbers, error = made[name](settings, backend, draw)
            moved = numbers * settings.torch_dtype.itemsize
            yield KernelVariant(name, None, call, moved, error)


Draw = Callable[..., torch.Tensor]
Made = tuple[Callable[[], object], int, Callable[[], float]]


def _norm(settings: KernelSettings, backend: str, draw: Draw) -> Made:
    B, F = settings.batch, settings.heads * settings.head_dim
    residual, hidden, weight = draw(B, F), draw(B, F), draw(F)
    call = partial(add_rms_norm.on(backend), residual, hidden, weight, EPS)

    def error() -> float:
        total, normed = call()
        wide = total.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        summed = _error(total, residual.double() + hidden.double())
        return max(summed, _error(normed, expected))

    return call, 4 * B * F + F, error


def _rotation(settings: KernelSettings, backend: str, draw: Draw) -> Made:
    B, D = settings.batch, settings.head_dim
    query, key = draw(B, 1, settings.heads, D), draw(B, 1, settings.kv_heads, D)
    angle, weight = draw(B, 1, D // 2).repeat(1, 1, 2), draw(D)
    cos, sin = angle.cos(), angle.sin()
    call = partial(rotary.on(backend), query, key, cos, sin, weight, weight, EPS)

    def error() -> float:
        worst = 0.0
        for got, rows in zip(call(), (query, key), strict=True):
            wide = rows.double().transpose(1, 2)
            wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
            first, second = wide.chunk(2, -1)
            turned = torch.cat((-second, first), -1)
            along, across = wide * cos.double()[:, None], turned * sin.double()[:, None]
            worst = max(worst, _error(got, along + across, along.abs() + across.abs()))
        return worst

    return call, 2 * (query.numel() + key.numel()) + 2 * cos.numel() + 2 * D, error


def _gate(settings: KernelSettings, backend: str, draw: Draw) -> Made:
    B, F = settings.batch, settings.heads * settings.head_dim
    gate, up = draw(B, F), draw(B, F)
    call = partial(silu_mul.on(backend), gate, up)

    def error() -> float:
        return _error(call(), gate.double() * torch.sigmoid(gate.double()) * up.double())

    return call, 3 * B * F, error


def _error(got: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor | None = None) -> float:
    # half an epsilon for each rounding, and a few float32 epsilons for the sums of squares
    kind = torch.finfo(got.dtype)
    bound = ROUNDINGS * (kind.eps + 4 * torch.finfo(torch.float32).eps)
    sizes = expected.abs() if sizes is None else sizes
    return share((got.double() - expected).abs(), bound * sizes + kind.tiny)
