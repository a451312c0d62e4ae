"""Counters and clock of a run."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sfi_core.state.kv_store import Recall
from sfi_kernels.compiled import clock, compiling_seconds


def steady_seconds(laps: Mapping[tuple[int, ...], Sequence[float]]) -> float:
    """Return the seconds of steps, given by kind, if each took the median of its kind.

    So neither code that runs for the first time nor a hiccup of the machine counts.
    """
    return sum(len(seconds) * statistics.median(seconds) for seconds in laps.values())


@dataclass(slots=True)
class Meter:
    """The counters and the clock of one run; times are of `sfi_kernels.compiled.clock`.

    Calls of attention and maintenance are counted in `paths`, requests x layers x steps, and launches of Triton kernels
    in `kernels`. `not_replayed` and `not_compiled` are those of `RunReport`; `replayed` says whether the step under way
    was replayed as a CUDA graph. `row_bytes` are the number of layers counted, and a token's bytes of keys and values:
    in those layers that are always dense, and in the others. `recalled` counts rows from the host by the bytes of a
    row, int64, on the device.

    The seconds are those of reading prompts (step 0 of every request), of the other steps, of the part of these that
    recorded CUDA graphs, and of waiting on the host for recalled rows. `laps` has those of the steps without recording,
    by their number of slow and of fast requests. `born` is when the run was made, `began` and `ended` when the step
    under way began and the last one ended.
    """

    paths: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    not_replayed: str = ""
    not_compiled: str = ""
    replayed: bool = False
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    recording_seconds: float = 0.0
    laps: dict[tuple[int, ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    row_bytes: tuple[int, int, int] = (0, 0, 0)
    recalled: dict[int, torch.Tensor] = field(default_factory=dict)
    recall_seconds: float = 0.0
    born: float = field(default_factory=clock)
    began: float = field(default_factory=clock)
    ended: float = 0.0
    _compiled: float = field(default_factory=compiling_seconds)
    _recorded: float = 0.0

    def count(self, path: str, times: int = 1) -> None:
        """Count calls of a path."""
        self.paths[path] += times

    def count_recall(self, step: int, brought: Recall) -> None:
        """Count a recall of a decoding step; those of step 0 belong to reading the prompt."""
        if step > 0:
            rows, size = brought.rows_RH.sum(), brought.row_bytes
            self.recalled[size] = self.recalled[size] + rows if size in self.recalled else rows
            self.recall_seconds += brought.waited

    @property
    def recalled_bytes(self) -> int:
        """Recalled bytes; waits for the device."""
        return sum(size * int(rows) for size, rows in self.recalled.items())

    def begin(self) -> None:
        """Start the clock of a step."""
        self.replayed, self._recorded = False, self.recording_seconds
        self.began = clock()

    def lap(self, kind: tuple[int, ...] | None = None, *, prefill: bool) -> float:
        """End the step and return its seconds; those of a decoding step with a `kind` are kept."""
        self.ended = clock()
        if prefill:
            self.prefill_seconds += self.lasted
        else:
            self.decode_seconds += self.lasted
            if kind is not None:
                self.laps[kind].append(self.lasted - self.recording_seconds + self._recorded)
        return self.lasted

    @property
    def compiling_seconds(self) -> float:
        """The seconds that numba compiled since the run was made."""
        return compiling_seconds() - self._compiled

    @property
    def lasted(self) -> float:
        """The seconds of the last step that has ended."""
        return self.ended - self.began
