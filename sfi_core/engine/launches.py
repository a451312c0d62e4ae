"""Launch counts of the Triton kernels, in memory that does not grow with the steps."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

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

    Attributes:
        counted: Launches outside replays, by name and layer.
        recorded: The recorded steps.
        steps: Number of steps in which each kernel ran.
    """

    counted: ByLayer = field(default_factory=Counter)
    recorded: list[Recorded] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    _last: dict[str, int] = field(default_factory=dict)

    def add(self, launched: Mapping[str, int], step: int, layer: int) -> None:
        """Count a step's launches in a layer, by kernel."""
        for name, count in launched.items():
            self.counted[name, layer] += count
            self._ran(name, step)

    def add_step(self, launches: ByLayer, step: int) -> None:
        """Count the launches of a whole step."""
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
        for one in self.recorded:
            for key, count in one.launches.items():
                total[key] += count * one.times
        return total

    def _ran(self, name: str, step: int) -> None:
        if self._last.get(name) != step:
            self._last[name] = step
            self.steps[name] += 1
