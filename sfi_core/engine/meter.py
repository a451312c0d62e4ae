"""Counters and clock of a run."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from sfi_core.state.kv_store import Recall
from sfi_kernels.compiled import clock, compiling_seconds
from sfi_kernels.launch import counting

ByLayer = Counter[tuple[str, int]]  # by a kernel's name and the layer


@dataclass(slots=True)
class Recorded:
    """The launches of one replay of a recorded step, and how many `times` it was replayed."""

    launches: ByLayer
    names: frozenset[str] = field(init=False)
    times: int = 0

    def __post_init__(self) -> None:
        """List the kernels' names once."""
        self.names = frozenset(name for name, _ in self.launches)


@dataclass(slots=True)
class Launches:
    """The launches of a run, whose steps come in order.

    `counted` has those outside replays, by name and layer; `recorded` are the recorded steps. `steps` counts
    by kernel the steps in which it ran.
    """

    counted: ByLayer = field(default_factory=Counter)
    recorded: list[Recorded] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    _last: dict[str, int] = field(default_factory=dict)

    def add(self, launches: ByLayer, step: int) -> None:
        """Count launches of a step."""
        self.counted.update(launches)
        for name, _ in launches:
            self._ran(name, step)

    def add_replay(self, recorded: Recorded, step: int) -> None:
        """Count a replay of one of the `recorded` steps."""
        recorded.times += 1
        for name in recorded.names:
            self._ran(name, step)

    def total(self) -> ByLayer:
        """Add up all launches, by name and layer."""
        total = self.counted.copy()
        for step in self.recorded:
            for key, count in step.launches.items():
                total[key] += count * step.times
        return total

    def _ran(self, name: str, step: int) -> None:
        if self._last.get(name) != step:
            self._last[name] = step
            self.steps[name] += 1


def steady_seconds(laps: Mapping[tuple[int, ...], Sequence[float]]) -> float:
    """Return the seconds of steps, given by kind, if each took the median of its kind.

    So neither code that runs for the first time nor a hiccup of the machine counts.
    """
    return sum(len(seconds) * statistics.median(seconds) for seconds in laps.values())


WHOLE_STEP = -1  # in place of a layer, for work that a step does once for all layers


@dataclass(slots=True)
class Meter:
    """The counters and the clock of one run; times are of `sfi_kernels.compiled.clock`.

    Calls of attention and maintenance are counted in `paths`, requests x layers x steps, and launches of
    Triton kernels in `kernels`, by layer or under `WHOLE_STEP`. `not_replayed` and `not_compiled` are those of
    `RunReport`;
    `replayed` says whether the step under way was replayed as a CUDA graph. `row_bytes` are the number of
    layers counted, and a token's bytes of keys and values: in those layers that are always dense, and in the
    others. `recalled` counts rows from the host by the bytes of a row, int64, on the device.

    The seconds are those of reading prompts (step 0 of every request), of the other steps, of the part of these that
    recorded CUDA graphs, and of waiting on the host for recalled rows. `laps` has those of the steps without recording,
    by their number of slow and of fast requests. `born` is when the run was made, `began` and `ended` when the step
    under way began and the last one ended.
    """

    paths: Counter[str] = field(default_factory=Counter)
    kernels: Launches = field(default_factory=Launches)
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

    @contextmanager
    def launches(self, step: int, layer: int) -> Iterator[None]:
        """Count the Triton kernels launched inside under a step and a layer."""
        launched: Counter[str] = Counter()
        with counting(launched):
            yield
        self.kernels.add(Counter({(name, layer): n for name, n in launched.items()}), step)

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
