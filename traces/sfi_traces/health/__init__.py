"""Selection health: rules that find silently wrong selections in a trace."""

from typing import Any

from sfi_traces.health.measured import BEGINNING, IMPORTED, RECORD, Measured, Unjudged
from sfi_traces.health.rules import PROBLEM, RULES, Rule
from sfi_traces.model.request import Request


def judge(request: Request, *, quick: bool = False) -> dict[str, Any]:
    """Apply every rule; with `quick`, without those that unnest lists of positions.

    `findings` has for each rule and request beyond its threshold the worst value with its layer and head, how
    many of the `places` (KV heads, layers or requests) are `beyond`, a message and advice; `judged` the worst
    value of each rule; `not_judged` what would record a rule's data; `sound` whether there is no problem.
    """
    document: dict[str, Any] = {"findings": [], "judged": [], "not_judged": []}
    for rule in RULES:
        if quick and rule.unnests:
            continue
        try:
            found = _enough(request, rule)
        except Unjudged as why:
            reason = IMPORTED if request.trace.imported and str(why) in RECORD else str(why)
            document["not_judged"].append({"rule": rule.name, "reason": reason})
            continue
        worst = max(found, key=lambda one: one.value)
        facts = {"value": worst.value, "threshold": rule.threshold, "places": len(found)}
        document["judged"].append({"rule": rule.name, **facts})
        document["findings"] += _findings(rule, found, imported=bool(request.trace.imported))
    document["sound"] = not problems(document)
    return document


def problems(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Pick the findings of severity "problem" from what `judge` returned."""
    return [one for one in document["findings"] if one["severity"] == PROBLEM]


def line(finding: dict[str, Any]) -> str:
    """Write a finding as a line."""
    return f"{finding['rule']}: {finding['message']}. To do: {finding['advice']}"


def _enough(request: Request, rule: Rule) -> list[Measured]:
    found = rule.measure(request)
    if not found:
        raise Unjudged(rule.needs)
    enough = [one for one in found if one.n >= rule.least]
    if not enough:
        most = max(one.n for one in found)
        raise Unjudged(f"it takes {rule.least} {rule.samples}, got {most}")
    return enough


def _findings(rule: Rule, found: list[Measured], *, imported: bool) -> list[dict[str, Any]]:
    findings = []
    for index in sorted({one.request for one in found}):
        own = [one for one in found if one.request == index]
        beyond = [one for one in own if one.value >= rule.threshold]
        if not beyond or len(beyond) < rule.share * len(own):
            continue
        worst = max(beyond, key=lambda one: one.value)
        findings.append(
            {
                "rule": rule.name,
                "severity": rule.severity,
                **{name: getattr(worst, name) for name in ("request", "layer", "head", "value")},
                "threshold": rule.threshold,
                "beyond": len(beyond),
                "places": len(own),
                "message": _message(rule, worst, len(beyond), len(own)),
                "advice": (imported and rule.advice_imported) or rule.advice,
            }
        )
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


__all__ = ["RULES", "judge", "line", "problems"]
