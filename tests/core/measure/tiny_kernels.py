"""Sizes of the kernel benchmark that its tests can afford."""

import torch

from sfi_core.measure.kernel_bench.settings import KernelSettings

TINY = {"heads": 4, "kv_heads": 2, "head_dim": 16, "context": 150, "batch": 2, "recent": 20}
CPU = torch.device("cpu")


def tiny(**changes) -> KernelSettings:
    return KernelSettings(**{**TINY, "dtype": "float32", "retentions": (0.5,), **changes})
