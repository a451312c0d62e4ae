"""The numbers of a comparison that can have a limit, as in `sfi trace diff --fail-if 'overlap<0.9'`."""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from sfi_core.errors import ConfigError, TraceError, unknown
from sfi_traces.model.trace import Row

METRICS = {  # name: meaning, what records it
    "equal_share": ("share of equal tokens, of the request with the least", "both with token ids"),
    "first_difference": ("first step whose token differs; infinite without one", "both with token ids"),
    "first_layer_step": (
        "first step at which a layer's support or selection differs; infinite without one",
        "both with --audit N or trace.positions",
    ),
    "first_layer": (
        "lowest layer that differs at first_layer_step; infinite without one",
        "both with --audit N or trace.positions",
    ),
    "overlap": ("mean overlap of the supports at equal steps", "both with --audit N"),
    "overlap_p5": ("its 5th percentile", "both with --audit N"),
    "selection_overlap": ("mean overlap of the selections at equal steps", "both with trace.positions"),
    "retained_mass": ("mean retained mass of B's fast steps", "B with --audit N"),
    "speed": ("tokens a second of B over those of A", "both to a step after the first"),
    "slow_time": ("median time of B's slow steps over that of A's", "slow steps in both"),
    "fast_time": ("median time of B's fast steps over that of A's", "fast steps in both"),
    "read_ratio": ("what B reads of the cache, choosing included, over A", "both to a step after the first"),
}
NEVER = ("first_difference", "first_layer_step", "first_layer")
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne,
}  # fmt: skip
LIMIT = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|==|!=|<|>)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*")


def metrics(document: Row) -> dict[str, float | None]:
    """Return the numbers of `METRICS`; None: the traces do not have it, or no difference was found."""
    requests = [row for row in document["requests"] if row["equal_share"] is not None]
    layers = [row["first_layer"] for row in requests if row["first_layer"] is not None]
    first: Row = min(layers, key=lambda one: (one["step"], one["layer"]), default={})
    differences = [row["first_difference"] for row in requests if row["first_difference"]]
    supports = (document["supports"] or {}).get("overlap", {})
    ratios = document["ratios"]
    return {
        "equal_share": min((row["equal_share"] for row in requests), default=None),
        "first_difference": min((one["step"] for one in differences), default=None),
        "first_layer_step": first.get("step"),
        "first_layer": first.get("layer"),
        "overlap": supports.get("mean"),
        "overlap_p5": supports.get("p5"),
        "selection_overlap": (document["selections"] or {}).get("overlap", {}).get("mean"),
        "retained_mass": document["b"]["retained_mass"],
        "speed": ratios["tokens_per_second"],
        "slow_time": ratios["slow_p50_us"],
        "fast_time": ratios["fast_p50_us"],
        "read_ratio": ratios["cache_read_ratio"],
    }


@dataclass(frozen=True, slots=True)
class Limit:
    """A condition that fails a comparison which meets it: a metric's name, an operator and a number."""

    text: str
    name: str
    compares: Callable[[float, float], bool]
    number: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `NAME OPERATOR NUMBER`; raises `ConfigError` for another text or an unknown name."""
        match = LIMIT.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"fail-if must be NAME, one of {' '.join(OPERATORS)} and a number, got {text!r}; "
                f"names: {', '.join(METRICS)}"
            )
        name, sign, number = match.groups()
        if name not in METRICS:
            raise unknown("fail-if name", name, METRICS)
        return cls(text.strip(), name, OPERATORS[sign], float(number))

    def value_of(self, document: Row) -> float:
        """Return the comparison's number, infinite for a difference that was not found.

        Raises `TraceError` if the traces do not have the number.
        """
        value: float | None = document["metrics"][self.name]
        if value is None and self.name in NEVER and _looked(document, self.name):
            return math.inf
        if value is None:
            raise TraceError(
                f"fail-if {self.text!r} needs {self.name}, which the traces do not have; record {METRICS[self.name][1]}"
            )
        return value

    def meets(self, document: Row) -> bool:
        """Say whether the condition holds; raises as `value_of`."""
        return self.compares(self.value_of(document), self.number)


def _looked(document: Row, name: str) -> bool:
    # whether a difference could have been seen
    if name == "first_difference":
        return document["metrics"]["equal_share"] is not None
    return any(document[table] is not None for table in ("supports", "selections"))
