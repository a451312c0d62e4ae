"""The kernel benchmark: it checks each op against its formula, then times it, beside the honest rivals."""

from sfi_core.measure.kernel_bench.bench import BenchResult, WrongResultError, run_bench
from sfi_core.measure.kernel_bench.settings import OPS, TABLE_1, BenchSettings, resolve_backend

__all__ = [
    "OPS",
    "TABLE_1",
    "BenchResult",
    "BenchSettings",
    "WrongResultError",
    "resolve_backend",
    "run_bench",
]
