"""Selection health: rules that find silently wrong selections in a trace, also while its run goes on."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb

from sfi_core.errors import SfiError
from sfi_traces.health.measures import BEGINNING, IMPORTED, RECORD, Measured, Unjudged
from sfi_traces.health.rules import RULES, Rule
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace

FIRST = 10.0  # seconds before a run is first judged
SHARE = 0.02  # of the time from one judgement to the next, that a judgement may take


def judge(request: Request, *, quick: bool = False) -> dict[str, Any]:
    """Apply every rule; with `quick`, without those that unnest lists of positions.

    `findings` has for each rule and request beyond its threshold the worst value with its layer and head, how
    many of the `places` (KV heads, layers or requests) are `beyond`, a message and advice; `judged` the worst
    value of each rule; `not_judged` what would record a rule's data; `sound` whether there is no finding.
    """
    document: dict[str, Any] = {"findings": [], "judged": [], "not_judged": []}
    for rule in RULES:
        if quick and rule.unnests:
            continue
        try:
            values = _enough(request, rule)
        except Unjudged as why:
            reason = IMPORTED if request.trace.imported and str(why) in RECORD else str(why)
            document["not_judged"].append({"rule": rule.name, "reason": reason})
            continue
        worst = max(values, key=lambda value: value.value)
        facts = {"value": worst.value, "threshold": rule.threshold, "places": len(values)}
        document["judged"].append({"rule": rule.name, **facts})
        document["findings"] += _findings(rule, values)
    document["sound"] = not document["findings"]
    return document


def line(finding: dict[str, Any]) -> str:
    """Write a finding as a line."""
    return f"{finding['rule']}: {finding['message']}. To do: {finding['advice']}"


def _enough(request: Request, rule: Rule) -> list[Measured]:
    values = rule.measure(request)
    if (most := max((value.n for value in values), default=0)) < rule.least:
        raise Unjudged(f"it takes {rule.least} {rule.samples}, got {most}" if values else rule.needs)
    return [value for value in values if value.n >= rule.least]


def _findings(rule: Rule, values: list[Measured]) -> list[dict[str, Any]]:
    findings = []
    for index in sorted({value.request for value in values}):
        of_request = [value for value in values if value.request == index]
        beyond = [value for value in of_request if value.value >= rule.threshold]
        if not beyond:
            continue
        worst = max(beyond, key=lambda value: value.value)
        if len(beyond) < rule.share * len(of_request) and worst.value < rule.alone:
            continue
        place = {name: getattr(worst, name) for name in ("request", "layer", "head", "value")}
        counts = {"threshold": rule.threshold, "beyond": len(beyond), "places": len(of_request)}
        words = {"message": _message(rule, worst, len(beyond), len(of_request)), "advice": rule.advice}
        findings.append({"rule": rule.name, **place, **counts, **words})
    return findings


def _message(rule: Rule, worst: Measured, beyond: int, places: int) -> str:
    value = f"{100 * worst.value:.0f} %" if rule.percent else f"{worst.value:.2f}"
    of = f"the first {BEGINNING}" if worst.of_beginning else f"the {worst.n:,}"
    where = f"request {worst.request}"
    if worst.layer is not None:
        others = f"and {beyond - 1} more" if beyond > 1 else "alone"
        head, kind = ("", "layers") if worst.head is None else (f" head {worst.head}", "KV heads")
        where += f", layer {worst.layer}{head}, {others} of {places} {kind}"
    if worst.of_beginning:
        where = f"{100 * (worst.whole or 0):.1f} % of all {worst.n:,}; {where}"
    return f"{rule.means.format(value=value, of=of)} ({where})"


class Watch:
    """Finds a trace's problems by the quick rules, and gives each rule and request once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with the run; `clock` gives seconds."""
        self._clock = clock
        self._due = clock() + FIRST
        self._known: set[tuple[str, int]] = set()

    def __call__(self, folder: Path) -> list[str]:
        """Return a line for each new problem of the trace so far; none until it is due again."""
        began = self._clock()
        if began < self._due:
            return []
        lines = self.news(folder)
        self._due = began + (self._clock() - began) / SHARE
        return lines

    def news(self, folder: Path) -> list[str]:
        """Return a line for each new problem; an unreadable trace has none."""
        try:
            findings = judge(Request.of(Trace.open(folder)), quick=True)["findings"]
        except (SfiError, OSError, duckdb.Error):
            return []
        new = [finding for finding in findings if (finding["rule"], finding["request"]) not in self._known]
        self._known.update((finding["rule"], finding["request"]) for finding in new)
        return [line(finding) for finding in new]


__all__ = ["RULES", "Watch", "judge", "line"]
