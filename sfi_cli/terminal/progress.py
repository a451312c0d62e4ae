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

    def _show(self, phase: str, done: int, total: int, line: str) -> None:
        # a bar on a terminal; elsewhere `line`, at most one in PATIENCE seconds
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._draw(phase, done, total)
        elif time.monotonic() - self._last > PATIENCE:
            self._last = time.monotonic()
            message(line)

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


class PrefillProgress(Progress):
    """Shows how many prompt tokens were read; removed when decoding starts."""

    def __init__(self, *, quiet: bool, label: str) -> None:
        super().__init__(quiet=quiet)
        self._label = label

    def __enter__(self) -> Self:
        """Show that the prompt is being read, before its first piece is."""
        self._show(f"{self._label}: reading the prompt", 0, 0, "")
        return super().__enter__()

    def update(self, read: int, total: int) -> None:
        """Show that `read` of `total` prompt tokens were read."""
        if read >= total:
            self.clear()
            return
        line = f"{self._label}: read {read:,} of {total:,} prompt tokens"
        self._show(f"{self._label}: reading the prompt", read, total, line)


class DecodeProgress(Progress):
    """Shows how many tokens were decoded."""

    def update(self, done: int, total: int) -> None:
        """Show that `done` of at most `total` steps are done."""
        self._show("decoding", done, total, f"decoded {done:,} of at most {total:,} tokens")

    def requests(self, done: int, running: int, waiting: int) -> None:
        """Show how many requests are done, running and waiting."""
        total, state = done + running + waiting, f"{running:,} running, {waiting:,} waiting"
        self._show(f"requests: {state}", done, total, f"{done:,} of {total:,} requests done, {state}")


class BenchProgress(Progress):
    """Shows which phase a benchmark is in, or how many kernels were compiled."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self._compiled = 0

    def update(self, phase: str, done: int, total: int) -> None:
        """Show that `done` of `total` parts of a phase are done; 0 is an unknown total."""
        self._show(phase, done, total, f"{phase}, {done} of {total}" if total else phase)

    def compiled(self, row: dict[str, Any], total: int) -> None:
        """Show a compiled kernel of `total`, 0 while that is unknown."""
        self._compiled += 1
        self.update(f"compiling, {row['kernel']} on {row['arch']}", self._compiled, total)


class ProgressObserver(NullObserver):
    """Shows the step of the batch; if requests wait, how many are done, running and waiting."""

    def __init__(self, progress: DecodeProgress, most: int) -> None:
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
            self._progress.requests(done, len(running), waiting)

    def on_step(self, event: StepEvent) -> None:
        """Show a finished step."""
        if not self._queues:
            self._progress.update(event.step + 1, self._most)
