"""Compares two traces of one model and the same prompts."""

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

from sfi_core.errors import ConfigError, TraceError, unknown
from sfi_core.settings.config import flat_settings
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Row, Trace, distribution
from sfi_traces.summary import sections

BEFORE = 12  # tokens shown before the first difference
FACTS = ("policy", "preset", "seed", "backend", "device", "sfi_version")
MODEL = ("name", "architecture", "query_heads", "vocabulary")
LAYER = ("layer", "heads", "key_width", "value_width", "window")
COMPARED = ("equal_share", "first_difference", "compared_steps", "slow_only_a", "slow_only_b")
UNKNOWN = dict.fromkeys(COMPARED)  # for a redacted trace
SAME_MASS = 1e-4  # tolerance of retained masses, for float32 sums on two machines
METRICS = {  # what `sfi trace diff --fail-if` knows, and what records it; docs/traces.md has the meanings
    **dict.fromkeys(("equal_share", "first_difference"), "both with token ids"),
    **dict.fromkeys(("first_layer_step", "first_layer"), "both with --audit N or trace.positions"),
    **dict.fromkeys(("overlap", "overlap_p5"), "both with --audit N and one audit.top"),
    "selection_overlap": "both with trace.positions",
    "retained_mass": "B with --audit N",
    "speed": "both to a step after the first",
    "slow_time": "slow steps in both",
    "fast_time": "fast steps in both",
    "read_ratio": "both to a step after the first",
}
# infinite without a difference, where one of these says that the traces were compared
INFINITE = {
    "first_difference": ("equal_share",),
    **dict.fromkeys(("first_layer_step", "first_layer"), ("overlap", "selection_overlap")),
}
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne,
}  # fmt: skip
LIMIT = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|==|!=|<|>)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*")


def compare(first: Trace, second: Trace, request: int | None = None) -> Row:
    """Compare two traces, or one request of both.

    Supports and selections are compared at equal steps, up to and including the first step whose token differs.
    Nothing is compared where a trace is redacted, no supports where `audit.top` differs, but for an imported indexer's
    selections.

    A request's `first_layer` is where the runs first differ, often before a token does: the first compared `step` at
    which a row that both traces have differs in positions, or in retained mass by more than `SAME_MASS`; the lowest
    such `layer`; and its KV heads that differ. Rounding on another machine may change the last of the positions.

    Returns each trace's own numbers under `a` and `b`, ratios of b to a, comparisons, and `metrics` (`METRICS`).

    Raises `TraceError` for traces of different models or prompts, or with a damaged part; `ConfigError` for a request
    that one lacks.
    """
    _check_model(first, second)
    a, b = Request.of(first, request), Request.of(second, request)
    _check_prompts(a, b)
    requests = _compare_steps(a, b)
    sides = [_numbers(side) for side in (a, b)]
    until = {row["request"]: row["compared_steps"] for row in requests if row["compared_steps"]}
    tops = {trace.manifest["audit"]["top"] for trace in (first, second) if trace.manifest["audit"]}
    alike = len(tops) < 2 or first.reads_own_selection or second.reads_own_selection  # noqa: PLR2004
    tables: tuple[str, ...] = ("supports", "selections") if alike else ("selections",)
    for table in tables:
        a.connection.register(f"other_{table}", second.dataset(table))
    layers = _first_layers(a, tables, until)
    for row in requests:
        row["first_layer"] = layers.get(row["request"])
    document = {
        "a": sides[0],
        "b": sides[1],
        "request": request,
        "settings": _changed(first.manifest, second.manifest),
        "requests": requests,
        **{name: _overlap(a, name, until) if name in tables else None for name in ("supports", "selections")},
        "ratios": {
            name: sides[1][name] / sides[0][name] if sides[0][name] and sides[1][name] is not None else None
            for name in ("slow_p50_us", "fast_p50_us", "tokens_per_second", "read_ratio", "cache_read_ratio")
        },
    }
    return document | {"metrics": _metrics(document)}


def _check_model(first: Trace, second: Trace) -> None:
    shapes = [
        [trace.manifest["model"].get(key) for key in MODEL]
        + [[layer[key] for key in LAYER] for layer in trace.manifest["model"]["layers"]]
        for trace in (first, second)
    ]
    if shapes[0] != shapes[1]:
        names = [f"{trace.manifest['model']['name']} in {trace.path}" for trace in (first, second)]
        raise TraceError(f"traces must be of one model, got {' and '.join(names)}")


def _check_prompts(request: Request, other: Request) -> None:
    prompts, others = (_prompts(side) for side in (request, other))
    if prompts.keys() != others.keys():
        counts = f"{len(prompts)} in {request.trace.path} and {len(others)} in {other.trace.path}"
        raise TraceError(f"traces must have the same requests, got {counts}; choose with --request")
    for index, prompt in prompts.items():
        # None: a redacted trace has no hashes, an early killed one no prompts
        if any(a != b for a, b in zip(prompt, others[index], strict=True) if None not in (a, b)):
            counts = f"{prompt[0]} tokens in {request.trace.path} and {others[index][0]} in {other.trace.path}"
            raise TraceError(f"traces must have the same prompts, got another for request {index}: {counts}")


def _prompts(request: Request) -> dict[int, tuple[int | None, str | None]]:
    known = {p["request"]: (p["tokens"], p["sha256"]) for p in request.trace.manifest.get("prompts", [])}
    rows = request.query("SELECT DISTINCT request FROM chosen_steps ORDER BY request")
    return {row["request"]: known.get(row["request"], (None, None)) for row in rows}


def _compare_steps(request: Request, other: Request) -> list[Row]:
    query = "SELECT request, step, token_id, token_text, slow FROM chosen_steps ORDER BY request, step"
    steps, others = (
        {index: list(rows) for index, rows in groupby(side.query(query), operator.itemgetter("request"))}
        for side in (request, other)
    )
    redacted = any(side.trace.redacted for side in (request, other))
    return [
        {
            "request": index,
            "steps": {"a": len(steps[index]), "b": len(others[index])},
            **(UNKNOWN if redacted else _compare_tokens(steps[index], others[index])),
        }
        for index in steps
    ]


def _compare_tokens(steps: list[Row], others: list[Row]) -> Row:
    equal = [a["token_id"] == b["token_id"] for a, b in zip(steps, others, strict=False)]
    at = equal.index(False) if False in equal else None
    compared = len(equal) if at is None else at + 1
    slow = [{row["step"] for row in rows[:compared] if row["slow"]} for rows in (steps, others)]
    difference = None
    if at is not None:
        token = [{key: row[at][key] for key in ("token_id", "token_text")} for row in (steps, others)]
        before = "".join(row["token_text"] or "" for row in steps[max(0, at - BEFORE) : at])
        difference = {"step": steps[at]["step"], "before": before, "a": token[0], "b": token[1]}
    return {
        "equal_share": sum(equal) / len(equal),
        "first_difference": difference,
        "compared_steps": compared,
        "slow_only_a": sorted(slow[0] - slow[1]),
        "slow_only_b": sorted(slow[1] - slow[0]),
    }


def _overlap(request: Request, table: str, until: dict[int, int]) -> Row | None:
    if not until:
        return None
    pairs = f"{_both(table, until)} AND len(this.positions) > 0 AND len(that.positions) > 0"
    request.compare("pairs", f"SELECT this.layer, this.positions AS first, that.positions AS second {pairs}")
    rows = request.query(f"""
        SELECT layer, {distribution("overlap")} AS overlap FROM pairs
        GROUP BY GROUPING SETS ((), (layer)) ORDER BY layer NULLS FIRST
    """)  # noqa: S608 - our own words and numbers
    return {"overlap": rows[0]["overlap"], "layers": rows[1:]} if len(rows) > 1 else None


def _both(table: str, until: dict[int, int]) -> str:
    # SQL: pairs of rows, `this` and `that`, that both traces have at the compared steps
    steps = ", ".join(f"({index:d}, {count:d})" for index, count in until.items())
    return f"""
        FROM chosen_{table} this
        JOIN (VALUES {steps}) compared (request, steps) ON compared.request = this.request
        JOIN other_{table} that ON (that.request, that.step, that.layer, that.head)
            = (this.request, this.step, this.layer, this.head)
        WHERE this.step < compared.steps
    """


def _first_layers(request: Request, tables: Sequence[str], until: dict[int, int]) -> dict[int, Row]:
    # by request, the first step and lowest layer at which a row of either table differs
    if not until:
        return {}
    moved = "coalesce(this.positions <> that.positions, false)"
    mass = f"coalesce(abs(this.retained_mass - that.retained_mass) > {SAME_MASS}, false)"
    differs = {"supports": f"{moved} OR {mass}", "selections": moved}
    places = " UNION ALL ".join(
        f"""
        SELECT this.request, '{table}' AS "table", this.step, this.layer,
            list(this.head ORDER BY this.head) AS heads, bool_or({moved}) AS positions
        {_both(table, until)} AND ({differs[table]}) GROUP BY this.request, this.step, this.layer
        """
        for table in tables
    )
    rows = request.query(f"""
        SELECT * FROM ({places})
        QUALIFY row_number() OVER (PARTITION BY request ORDER BY step, layer, "table" DESC) = 1
    """)  # noqa: S608 - our own words and numbers
    return {row.pop("request"): row for row in rows}


def _numbers(request: Request) -> Row:
    document = sections(request, ("steps", "audit", "selections", "latency"))
    steps, selections = document["steps"], document["selections"]
    kinds = {kind["kind"]: kind for kind in document["latency"]["kinds"]}
    audit = document["audit"] or {}
    return {
        "trace": str(request.trace.path),
        "policy": request.trace.manifest["policy"],
        **{key: steps[key] for key in ("steps", "slow", "slow_share", "reasons", "read_ratio", "cache_read_ratio")},
        "retained_mass": audit["retained_mass"]["mean"] if audit else None,
        "lambda_star": selections["lambda_star"]["mean"] if selections else None,
        **{f"{kind}_p50_us": kinds[kind]["p50_us"] if kind in kinds else None for kind in ("prefill", "slow", "fast")},
        "tokens_per_second": document["latency"]["tokens_per_second"],
        "audited": document["latency"]["audited"],
    }


def _changed(first: Row, second: Row) -> Row:
    a, b = (
        {name: manifest.get(name) for name in FACTS}
        | {"lossless": bool(manifest.get("lossless"))}
        | {"dtype": manifest["model"].get("dtype")}
        | flat_settings(manifest["config"])
        | ({"audit.top": manifest["audit"]["top"]} if all(side.get("audit") for side in (first, second)) else {})
        for manifest in (first, second)
    )
    return {name: {"a": a.get(name), "b": b.get(name)} for name in a | b if a.get(name) != b.get(name)}


def _metrics(document: Row) -> dict[str, float | None]:
    # the numbers of `METRICS`; None: the traces do not have it, or no difference was found
    requests = [row for row in document["requests"] if row["equal_share"] is not None]
    layers = [row["first_layer"] for row in requests if row["first_layer"] is not None]
    first: Row = min(layers, key=lambda place: (place["step"], place["layer"]), default={})
    differences = [row["first_difference"]["step"] for row in requests if row["first_difference"]]
    supports = (document["supports"] or {}).get("overlap", {})
    ratios = document["ratios"]
    return {
        "equal_share": min((row["equal_share"] for row in requests), default=None),
        "first_difference": min(differences, default=None),
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
        metrics: dict[str, float | None] = document["metrics"]
        value = metrics[self.name]
        if value is not None:
            return value
        if any(metrics[name] is not None for name in INFINITE.get(self.name, ())):
            return math.inf
        raise TraceError(
            f"fail-if {self.text!r} needs {self.name}, which the traces do not have; record {METRICS[self.name]}"
        )

    def meets(self, document: Row) -> bool:
        """Say whether the condition holds; raises as `value_of`."""
        return self.compares(self.value_of(document), self.number)
