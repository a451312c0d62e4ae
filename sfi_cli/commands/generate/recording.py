"""The observers of a run that the options ask for: the trace, and NVTX ranges for a profiler."""

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
    """The options of the trace.

    Attributes:
        folder: Where the trace goes; None for no trace.
        force: Whether a trace that is there may be replaced.
        settings: What the trace holds.
        audit: The audit; None without one.
    """

    folder: Path | None
    force: bool
    settings: TraceTable
    audit: AuditConfig | None

    def __post_init__(self) -> None:
        """Refuse an audit that is written nowhere."""
        if self.audit is not None and self.folder is None:
            raise ConfigError("--audit needs a trace to write to; add --trace DIR")

    @contextmanager
    def observers(
        self, tokenizer: Any, device: Any, provenance: dict[str, Any], quiet: bool
    ) -> Iterator[tuple[list["Observer"], Callable[[str | None], None]]]:
        """Open the observers of a run on a device, and close them however it ends.

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
        if self.folder.exists() and not quiet:  # gone where the run ended before it began
            message(f"Wrote {self.folder}; look at it with: sfi trace show {self.folder}")
            if torchrun.first():
                from sfi_traces.health import quick_problems

                for line in quick_problems(self.folder):
                    message(f"warning: {line}")


def _wait_for_ranks() -> None:
    # what reads the trace next is to find every rank's end in it
    from sfi_core.distributed.ranks import join

    try:
        join().first_ones(None)
    except RankLostError:
        message("another rank has ended early; its part of the trace may lack its end")
