"""The observers of `sfi generate`: the trace, and NVTX ranges for a profiler."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfi_cli.settings.tables import TraceTable
from sfi_cli.terminal.output import message
from sfi_core.distributed import torchrun
from sfi_core.errors import ConfigError, RankLostError
from sfi_core.settings.audit import AuditConfig

if TYPE_CHECKING:
    from sfi_core.observers.observer import Observer


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecording:
    """The options of the trace; without `folder` there is none, without `audit` no audit.

    `force` allows to replace a trace in the folder.
    """

    folder: Path | None
    force: bool
    settings: TraceTable
    audit: AuditConfig | None

    def __post_init__(self) -> None:
        """Refuse an audit without a trace."""
        if self.audit is not None and self.folder is None:
            raise ConfigError("--audit needs a trace to write to; add --trace DIR")

    @contextmanager
    def observers(
        self, tokenizer: Any, device: Any, provenance: dict[str, Any], quiet: bool
    ) -> Iterator[tuple[list["Observer"], Callable[[str | None], None]]]:
        """Open the observers of a run, close them at its end, and name the trace.

        Yields:
            The observers, and a function that takes the reason why the run stopped early.
        """
        from sfi_traces.record.nvtx import NvtxObserver
        from sfi_traces.record.parquet import ParquetObserver

        with ExitStack() as stack:
            found: list[Observer] = []
            if NvtxObserver.attached():
                found.append(stack.enter_context(NvtxObserver(spans=self.settings.spans)))
            if self.folder is None:
                yield found, lambda _: None
                return
            parquet = ParquetObserver(
                self.folder,
                tokenizer=tokenizer,
                positions=self.settings.positions,
                redact_text=self.settings.redact_text,
                provenance=provenance,
                force=self.force,
                warn=message,
                spans=self.settings.spans,
            )
            yield [*found, stack.enter_context(parquet)], parquet.close
        _wait_for_ranks()
        if self.folder.exists() and not quiet:  # absent if the run ended before its first step
            message(f"Wrote {self.folder}; look at it with: sfi trace show {self.folder}")
            if torchrun.first():
                from sfi_traces.health import quick_problems

                for line in quick_problems(self.folder):
                    message(f"warning: {line}")


def _wait_for_ranks() -> None:
    # the trace is complete only when every rank has closed its part
    from sfi_core.distributed.ranks import join

    try:
        join().first_ones(None)
    except RankLostError:
        message("another rank has ended early; its part of the trace may lack its end")
