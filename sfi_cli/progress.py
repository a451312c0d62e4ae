"""Progress of the prefill: a rich bar on a terminal, plain lines otherwise."""

import sys
import time
from types import TracebackType
from typing import Self

from sfi_cli.output import message

PATIENCE = 2.0  # seconds between plain lines


class PrefillProgress:
    """Shows how many prompt tokens were read; gone when decoding starts."""

    def __init__(self, *, quiet: bool, label: str) -> None:
        self._quiet, self._label = quiet, label
        self._last = time.monotonic()
        self._bar: object | None = None

    def __enter__(self) -> Self:
        """Start."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away, whatever happened."""
        self._stop()

    def update(self, read: int, total: int) -> None:
        """Show that `read` of `total` prompt tokens were read."""
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._draw(read, total)
        elif read < total and time.monotonic() - self._last > PATIENCE:
            self._last = time.monotonic()
            message(f"{self._label}: read {read:,} of {total:,} prompt tokens")

    def _draw(self, read: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        if not isinstance(self._bar, Progress):
            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(f"{self._label}: reading the prompt", total=total)
        self._bar.update(self._bar.task_ids[0], completed=read)
        if read >= total:
            self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]
            self._bar = None
