"""`sfi trace check`: whether a trace is sound, and its selections healthy."""

import typer

from sfi_cli import options as o
from sfi_cli.terminal.output import Output
from sfi_cli.terminal.tables import Part
from sfi_traces.views.table import Columns, Row, Table, count, plural

UNSOUND, UNHEALTHY = 3, 1
MOST_REQUESTS = 8


def check(folder: o.TraceDir, json: o.Json = False) -> None:
    """Read every part of a trace, and check that its slow steps follow from its tokens.

    The trace of a run that was killed is sound if it can be read. Exits with 3 if a part is damaged, a column is
    missing or a step breaks a rule.

    A sound trace is then judged by the rules of selection health (docs/traces.md): evicted sinks, a selection
    that is a window or never changes, scores that are all equal, dropped top positions, drift and more. Exits
    with 1 if a rule finds a problem.

    For example:

      sfi trace check run
    """
    from sfi_traces.health import judge
    from sfi_traces.model.check import check as look
    from sfi_traces.model.request import Request
    from sfi_traces.model.trace import Trace

    trace = Trace.open(folder)
    document = look(trace)
    judged = document["sound"] and document["recorded"]
    document["health"] = health = judge(Request.of(trace)) if judged else None
    Output(json=json).data(document, _text)
    if not document["sound"]:
        raise typer.Exit(UNSOUND)
    if health is not None and not health["sound"]:
        raise typer.Exit(UNHEALTHY)


def _text(document: Row) -> list[Part]:
    lines = [
        f"request {row['request']}: {plural(row['steps'], 'step')}, the last is {row['last_step']:,}"
        for row in document["recorded"][:MOST_REQUESTS]
    ]
    more = len(document["recorded"]) - len(lines)
    lines += [f"and {more:,} more requests"] if more else []
    if document["steps_checked"]:
        lines.append("every step's slowness, sentence and trigger were compared with the token ids")
    lines += [f"note: {line}" for line in document["notes"]]
    lines += [f"problem: {line}" for line in document["problems"]]
    health = document["health"]
    if health is not None:
        reasons: dict[str, list[str]] = {}
        for row in health["not_judged"]:
            reasons.setdefault(row["reason"], []).append(row["rule"])
        lines += [f"not judged: {', '.join(rules)} ({reason})" for reason, rules in reasons.items()]
        lines.append(health_lines(health).rstrip())
    state = "sound" if document["sound"] else "not sound"
    lines.append(state if health is None or health["sound"] else f"{state}, but not healthy")
    return [Table.of(document["trace"], TABLES, document["tables"]), *lines]


def finding_lines(health: Row) -> list[str]:
    """Write a line for each problem that selection health found."""
    from sfi_traces.health import line

    return [f"health problem: {line(row)}" for row in health["findings"]]


def health_lines(health: Row) -> str:
    """Write a line for each problem, and the number of rules judged."""
    worse = finding_lines(health)
    judged = f"health: {plural(len(worse), 'problem')} by {plural(len(health['judged']), 'rule')}"
    others = f"; {len(health['not_judged'])} not judged" if health["not_judged"] else ""
    return "\n".join([*worse, judged + others]) + "\n"


TABLES: Columns = {
    "table": (str, "table"),
    "parts": (count, "parts"),
    "rows": (count, "rows"),
    "rows told": (count, "expected_rows"),
}
