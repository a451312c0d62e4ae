"""Progress as an observer of the run."""

from sfi_cli.terminal.progress import DecodeProgress
from sfi_core.observers.events import BeginStepEvent, RunEvent, StepEvent
from sfi_core.observers.observer import NullObserver


class ProgressObserver(NullObserver):
    """Shows the step that the batch has reached, or how many requests where some have to wait."""

    def __init__(self, progress: DecodeProgress, most: int) -> None:
        self._progress, self._most = progress, most
        self._begun = self._requests = 0
        self._queues = False

    def on_run(self, event: RunEvent) -> None:
        """See whether requests wait."""
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
