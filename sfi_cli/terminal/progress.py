"""Progress of long work: a rich bar on a terminal, plain lines otherwise."""

import sys
import time
from contextlib import ExitStack
from typing import Any, Self

from sfi_cli.terminal.output import message
from sfi_core.observers.events import BeginStepEvent, RunEvent, StepEvent
from sfi_core.observers.observer import NullObserver
from sfi_kernels.compiled import telling

PATIENCE = 10.0  # seconds between plain lines


class Progress:
    """Shows how far a phase of the work is; removed when the work is done."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._last = time.monotonic()
        self._bar: Any = None
        self._within = ExitStack()

    def __enter__(self) -> Self:
        """Start; say that numba compiles, the first time it does."""
        self._within.enter_context(telling(self._compiles))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._within.close()
        self.clear()

    def update(self, phase: str, done: int, total: int) -> None:
        """Show `done` of `total` (0: unknown): a bar on a terminal, elsewhere at most a line in `PATIENCE` seconds."""
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._draw(phase, done, total)
        elif time.monotonic() - self._last > PATIENCE:
            self._last = time.monotonic()
            message(f"{phase}, {done:,} of {total:,}" if total else phase)

    def _compiles(self) -> None:
        if not self._quiet:
            message("compiling for this processor (once)")

    def _draw(self, phase: str, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            # the time goes on where a long step leaves the bar as it is
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(phase, total=None)
        task = self._bar.task_ids[0]
        self._bar.update(task, description=phase, completed=done, total=total or None)

    def clear(self) -> None:
        """Remove the bar; the next update draws it anew."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class ProgressObserver(NullObserver):
    """Shows the step of the batch; if requests wait, how many are done, running and waiting."""

    def __init__(self, progress: Progress, most: int) -> None:
        self._progress, self._most = progress, most
        self._begun = self._requests = 0
        self._queues = False

    def on_run(self, event: RunEvent) -> None:
        """Note whether requests wait."""
        self._begun, self._requests = event.batch, event.requests
        self._queues = event.requests > event.batch

    def on_begin_step(self, event: BeginStepEvent) -> None:
        """Count the requests."""
        if not self._queues:
            return
        running = (*event.slow, *event.fast)
        self._begun = max(self._begun, *(request + 1 for request in running))  # they begin in order
        if not event.reads_prompt:
            done, waiting = self._begun - len(running), self._requests - self._begun
            state = f"requests: {len(running):,} running, {waiting:,} waiting"
            self._progress.update(state, done, self._requests)

    def on_step(self, event: StepEvent) -> None:
        """Show a finished step."""
        if not self._queues:
            self._progress.update("decoding", event.step + 1, self._most)
