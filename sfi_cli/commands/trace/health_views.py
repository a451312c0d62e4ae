"""Selection health as lines, for `sfi trace check` and `show`."""

from sfi_traces.views.table import Row, plural


def finding_lines(found: Row, severity: str) -> list[str]:
    """Write a line for each finding of a severity, "problem" or "note"."""
    from sfi_traces.health import line

    return [f"health {severity}: {line(one)}" for one in found["findings"] if one["severity"] == severity]


def health_lines(found: Row) -> str:
    """Write a line for each finding, problems first, and the number of rules judged."""
    worse = finding_lines(found, "problem")
    judged = f"health: {plural(len(worse), 'problem')} by {plural(len(found['judged']), 'rule')}"
    left = f"; {len(found['not_judged'])} not judged" if found["not_judged"] else ""
    return "\n".join([*worse, *finding_lines(found, "note"), judged + left]) + "\n"


def unjudged_lines(found: Row) -> list[str]:
    """Write a line for each reason why rules were not judged."""
    reasons: dict[str, list[str]] = {}
    for one in found["not_judged"]:
        reasons.setdefault(one["reason"], []).append(one["rule"])
    return [f"not judged: {', '.join(rules)} ({reason})" for reason, rules in reasons.items()]
