"""Progress as an observer of the run."""

from sfi_cli.progress import DecodeProgress
from sfi_core.events import StepEvent
from sfi_core.observer import NullObserver


class ProgressObserver(NullObserver):
    """Shows the step that the batch has reached."""

    def __init__(self, progress: DecodeProgress, most: int) -> None:
        self._progress, self._most = progress, most

    def on_step(self, event: StepEvent) -> None:
        """Show a finished step."""
        self._progress.update(event.step + 1, self._most)
