"""What `sfi trace check` prints."""

from typing import Any

from sfi_cli.commands.trace.health_views import health_lines, unjudged_lines
from sfi_cli.terminal.tables import count, plural, rendered, table

MOST_REQUESTS = 8


def check_text(document: dict[str, Any]) -> str:
    """Return the rows of each table, the steps of each request, problems and health."""
    rows = [
        (
            _name(one), count(one["parts"]), count(one["rows"]), count(one["expected_rows"]),
            count(len(one["damaged"]) + len(one["absent"])),
        )
        for one in document["tables"]
    ]  # fmt: skip
    columns = ("table", "parts", "rows", "rows told", "damaged or missing")
    lines = [
        f"request {one['request']}: {plural(one['steps'], 'step')}, the last is {one['last_step']:,}"
        for one in document["recorded"][:MOST_REQUESTS]
    ]
    more = len(document["recorded"]) - len(lines)
    lines += [f"and {more:,} more requests"] if more else []
    if document["steps_checked"]:
        lines.append("every step's slowness, sentence and trigger were compared with the token ids")
    lines += [f"note: {line}" for line in document["notes"]]
    lines += [f"problem: {line}" for line in document["problems"]]
    found = document["health"]
    if found is not None:
        lines += [*unjudged_lines(found), health_lines(found).rstrip()]
    state = "sound" if document["sound"] else "not sound"
    lines.append(state if found is None or found["sound"] else f"{state}, but not healthy")
    return rendered([table(document["trace"], columns, rows), *lines])


def _name(table: dict[str, Any]) -> str:
    return f"{table['table']} of rank {table['rank']}" if table["rank"] else str(table["table"])
