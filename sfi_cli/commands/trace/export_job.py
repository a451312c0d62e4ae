"""`sfi trace export` after its options are read."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sfi_cli.terminal.output import Output
from sfi_cli.terminal.progress import Progress
from sfi_core.errors import ConfigError, SfiError

TIMELINE = "perfetto"  # of the whole trace, in one file
FORMATS = (TIMELINE, "csv", "jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """The options of `sfi trace export`.

    Attributes:
        form: One of `FORMATS`.
        table: The table to write, or None for all.
        output: File, or without `table` a folder; None is stdout.
    """

    form: str
    table: str | None
    output: Path | None
    force: bool
    quiet: bool

    def run(self, folder: Path) -> None:
        """Write the timeline, the table or all tables.

        Raises:
            ConfigError: Options that do not go together, or a file that exists.
            TraceError: The trace cannot be read, or lacks data for the format.
        """
        from sfi_traces.model.trace import Trace
        from sfi_traces.schema import TABLES

        if self.form not in FORMATS:
            raise ConfigError(f"unknown format {self.form!r}; expected one of {FORMATS}")
        if self.table is not None and self.form == TIMELINE:
            raise ConfigError(f"table must come with --format csv or jsonl, got {self.form}")
        if self.table is not None and self.table not in TABLES:
            raise ConfigError(f"unknown table {self.table!r}; expected one of {tuple(TABLES)}")
        if self.output is None and self.table is None and self.form != TIMELINE:
            raise ConfigError(
                f"{self.form} of all tables must have a folder; add -o FOLDER or --table NAME"
            )
        trace = Trace.open(folder)
        with ExportProgress(quiet=self.quiet) as progress:
            if self.form == TIMELINE or self.table is not None:
                pieces = self._pieces(trace, self.table, progress)
                with Output(self.output, force=self.force) as written:
                    written.pieces(pieces)
            elif self.output is not None:
                self._write_tables(trace, list(TABLES), self.output, progress)

    def _pieces(self, trace: Any, table: str | None, progress: "ExportProgress") -> Iterator[str]:
        from sfi_traces.export.perfetto import perfetto_text
        from sfi_traces.export.rows import table_text

        if table is None:
            return perfetto_text(trace, partial(progress.update, "the timeline"))
        return table_text(trace, table, self.form, partial(progress.update, table))

    def _write_tables(
        self, trace: Any, tables: list[str], folder: Path, progress: "ExportProgress"
    ) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(
                f"output {folder} must be a folder for all tables, got a file"
            ) from error
        except OSError as error:
            raise SfiError(f"output {folder} cannot be written: {error.strerror}") from error
        with ExitStack() as stack:
            # open all files first, so that a file that exists stops the export before anything is written
            files = {
                name: stack.enter_context(Output(folder / f"{name}.{self.form}", force=self.force))
                for name in tables
            }
            for name, file in files.items():
                file.pieces(self._pieces(trace, name, progress))


class ExportProgress(Progress):
    """Shows how much of a table or a timeline is written."""

    def update(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` rows or events are written."""
        line = f"exporting {what}: {done:,} of {total:,}"
        self._show(f"exporting {what}", done, total, line)
