"""What `sfi trace show` prints of a run on several ranks."""

from typing import Any

from sfi_cli.terminal.tables import count, duration, table


def rank_table(found: dict[str, Any]) -> Any:
    """Return a row for each rank that is there; the title says which are not."""
    rows = [
        (
            str(one["rank"]), count(one["steps"]), count(one["selections"]), count(one["spans"]),
            duration(one["forward_us"]), duration(one["attention_us"]),
            "yes" if one["finished"] else "no: killed, or goes on",
        )
        for one in found["each"]
    ]  # fmt: skip
    missing = ", ".join(map(str, found["missing"]))
    title = f"Ranks: {len(rows)} of {found['size']}" + (f", without {missing}" if missing else "")
    columns = ("rank", "steps", "selections", "spans", "pass (median)", "its attention", "finished")
    return table(title, columns, rows)
