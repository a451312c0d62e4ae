"""The observers of `sfi generate`: the trace, and NVTX ranges for a profiler."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfi_cli.settings.tables import TraceTable
from sfi_cli.terminal.output import Output, message
from sfi_core.distributed import torchrun

if TYPE_CHECKING:
    from sfi_core.observers.observer import Observer
    from sfi_traces.record.parquet import ParquetObserver


@contextmanager
def recording(
    folder: Path | None, table: TraceTable, output: Output, **options: Any
) -> Iterator[tuple[list["Observer"], "ParquetObserver | None"]]:
    """Open the observers of a run, close them at its end, and name the trace; no folder makes no trace.

    `options` go to `ParquetObserver`. Yields the observers, and that of the trace.
    """
    from sfi_traces.health.watch import Watch
    from sfi_traces.record.nvtx import NvtxObserver
    from sfi_traces.record.parquet import ParquetObserver

    with ExitStack() as stack:
        observers: list[Observer] = []
        nvtx = NvtxObserver(spans=table.spans)
        if nvtx.wants:
            observers.append(stack.enter_context(nvtx))
        if folder is None:
            yield observers, None
            return
        parquet = ParquetObserver(
            folder, positions=table.positions, redact_text=table.redact_text, spans=table.spans,
            force=output.force, warn=output.say, watch=(watch := Watch()), **options,
        )  # fmt: skip
        yield [*observers, stack.enter_context(parquet)], parquet
    if (
        parquet.failure is None and folder.exists() and not output.quiet
    ):  # absent if the run ended before its first step
        message(f"Wrote {folder}; look at it with: sfi trace show {folder}")
        if torchrun.first():
            for line in watch.news(folder):
                message(f"warning: {line}")
