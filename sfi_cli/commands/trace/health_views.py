"""Selection health as lines, for `sfi trace check` and `show`."""

from typing import Any

from sfi_cli.terminal.tables import plural

Row = dict[str, Any]


def health_lines(found: Row) -> str:
    """Write a line for each finding, problems first, and the number of rules judged."""
    from sfi_traces.health import line, problems

    worse = problems(found)
    notes = [one for one in found["findings"] if one not in worse]
    lines = [f"health problem: {line(one)}" for one in worse]
    lines += [f"health note: {line(one)}" for one in notes]
    judged = f"health: {plural(len(worse), 'problem')} by {plural(len(found['judged']), 'rule')}"
    left = f"; {len(found['not_judged'])} not judged" if found["not_judged"] else ""
    return "\n".join([*lines, judged + left]) + "\n"


def unjudged_lines(found: Row) -> list[str]:
    """Write a line for each reason why rules were not judged."""
    reasons: dict[str, list[str]] = {}
    for one in found["not_judged"]:
        reasons.setdefault(one["reason"], []).append(one["rule"])
    return [f"not judged: {', '.join(rules)} ({reason})" for reason, rules in reasons.items()]
