"""Objectives of a tuning, and limits that a setting must keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sfi_core.errors import ConfigError
from sfi_traces.replay import Outcome, Setting, Supports, replay
from sfi_traces.tune.study import Direction


@dataclass(frozen=True, slots=True)
class Objective:
    """A field of `Outcome` to minimize or maximize."""

    field: str
    direction: Direction

    def of(self, outcome: Outcome) -> float:
        """Return the number."""
        return float(getattr(outcome, self.field))

    def cost(self, outcome: Outcome) -> float:
        """Return the number with the sign that makes less better."""
        return self.of(outcome) if self.direction == "minimize" else -self.of(outcome)


OBJECTIVES = {
    "slow-rate": Objective("slow_rate", "minimize"),
    "bytes": Objective("bytes_per_token", "minimize"),
    "retained": Objective("retained_mass", "maximize"),
    "retained-p5": Objective("retained_mass_p5", "maximize"),
}
DEFAULT = ("bytes", "retained")


def objectives(names: Sequence[str]) -> dict[str, Objective]:
    """Look up objectives: at least one cost, and at least one measure of retained mass.

    Raises `ConfigError` for an unknown name, or if one of the two kinds is missing.
    """
    found = {}
    for name in names or DEFAULT:
        if name not in OBJECTIVES:
            raise ConfigError(f"objective must be one of {tuple(OBJECTIVES)}, got {name!r}")
        found[name] = OBJECTIVES[name]
    if {one.direction for one in found.values()} != {"minimize", "maximize"}:
        raise ConfigError(
            "objective must name a cost (slow-rate, bytes) and what is kept (retained, retained-p5), "
            f"got {','.join(found)}"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The least mean retained mass, and the largest share of the cached tokens read; None for no limit."""

    min_retained: float | None = None
    max_read: float | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a limit outside (0, 1]."""
        for name in ("min_retained", "max_read"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"{name.replace('_', '-')} must be in (0, 1], got {value}")

    def violations(self, outcome: Outcome) -> dict[str, float]:
        """Return by how much each limit is exceeded; at most 0 where it is kept."""
        found = {}
        if self.min_retained is not None:
            found["min-retained"] = self.min_retained - outcome.retained_mass
        if self.max_read is not None:
            found["max-read"] = outcome.read_ratio - self.max_read
        return found

    def kept_by(self, outcome: Outcome) -> bool:
        """Say whether an outcome keeps all limits."""
        return all(value <= 0 for value in self.violations(outcome).values())


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Replays each setting once over every request; `batch` of them share the weights in the byte model."""

    recorded: Sequence[Supports]
    batch: int = 1
    _known: dict[tuple[object, ...], Outcome] = field(default_factory=dict)

    def __call__(self, setting: Setting) -> Outcome:
        """Return a setting's outcome; raises `TraceError` for a budget beyond what an audit recorded."""
        key = setting.key
        if key not in self._known:
            self._known[key] = replay(self.recorded, setting, batch=self.batch)
        return self._known[key]


def costs(outcome: Outcome, chosen: Mapping[str, Objective]) -> tuple[float, ...]:
    """Return an outcome's objectives with the sign that makes less better."""
    return tuple(one.cost(outcome) for one in chosen.values())
