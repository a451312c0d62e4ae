"""Judges a trace while its run goes on."""

import time
from collections.abc import Callable
from pathlib import Path

import duckdb

from sfi_core.errors import SfiError
from sfi_traces.health import judge, line, problems
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace

FIRST = 10.0  # seconds before a run is first judged
SHARE = 0.02  # of the time from one judgement to the next, that a judgement may take


class Watch:
    """Finds a trace's problems by the quick rules, and gives each rule and request once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with the run; `clock` gives seconds."""
        self._clock = clock
        self._due = clock() + FIRST
        self._told: set[tuple[str, int]] = set()

    def __call__(self, folder: Path) -> list[str]:
        """Return a line for each new problem of the trace so far; none until it is due again."""
        began = self._clock()
        if began < self._due:
            return []
        found = self.news(folder)
        self._due = began + (self._clock() - began) / SHARE
        return found

    def news(self, folder: Path) -> list[str]:
        """Return a line for each new problem; an unreadable trace has none."""
        try:
            found = problems(judge(Request.of(Trace.open(folder)), quick=True))
        except (SfiError, OSError, duckdb.Error):
            return []
        new = [one for one in found if (one["rule"], one["request"]) not in self._told]
        self._told.update((one["rule"], one["request"]) for one in new)
        return [line(one) for one in new]
