"""Sizes of the kernel benchmark that its tests can afford."""

from collections.abc import Iterator
from itertools import chain

import torch

from sfi_core.measure.kernel_bench.cases import groups
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.result import KernelVariant
from sfi_core.measure.kernel_bench.settings import KernelSettings

TINY = {"heads": 4, "kv_heads": 2, "head_dim": 16, "context": 150, "batch": 2, "recent": 20}
CPU = torch.device("cpu")


def tiny(**changes) -> KernelSettings:
    return KernelSettings(**{**TINY, "dtype": "float32", "retentions": (0.5,), **changes})


def built(layer: LayerData) -> Iterator[KernelVariant]:
    """Yield the variants of all groups."""
    return chain.from_iterable(variants for _, variants in groups(layer))


def one_of(layer: LayerData, name: str) -> KernelVariant:
    return next(one for one in built(layer) if one.name == name)
