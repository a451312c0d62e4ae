"""The kernel benchmark: check each op against its formula, then time the op and its rivals."""

from sfi_core.measure.kernel_bench.bench import run_bench
from sfi_core.measure.kernel_bench.result import KernelResult, WrongResultError
from sfi_core.measure.kernel_bench.settings import OPS, TABLE_1, KernelSettings, resolve_backend

__all__ = [
    "OPS",
    "TABLE_1",
    "KernelResult",
    "KernelSettings",
    "WrongResultError",
    "resolve_backend",
    "run_bench",
]
