"""The table of `sfi tune --lossless`, from its document."""

from typing import Any

from sfi_cli.terminal.tables import count, number, percent, plural, table, wrapped

Row = dict[str, Any]
ROWS = 10
COLUMNS = ("", "triggers", "delay", "gap", "T_max", "draft", "kept each", "share", "read", "speed",
           "known", "ran: kept each", "share", "read", "speed")  # fmt: skip


def lossless_tune_text(document: Row) -> str:
    """Return the best settings, what was measured, and what was chosen."""
    rows = document["settings"]
    chosen = next(place for place, row in enumerate(rows) if row["chosen"])
    shown = [(str(i), row) for i, row in enumerate(rows, 1) if i <= ROWS or "measured" in row]
    heading = (
        f"{', '.join(document['traces'])}: {document['model']}, {document['policy']}, "
        f"{plural(document['requests'], 'request')}, {count(document['tested'])} drafted tokens tested; "
        f"{plural(document['candidates'], 'setting')} told apart"
    )
    title = f"Best settings as predicted (byte model: batch {document['batch_size']})"
    grid = table(
        title, COLUMNS, [_cells(*one) for one in [*shown, ("*", _recorded(document))]], left=2
    )
    known = (
        "known: share of the tested tokens of whose place and depth some were recorded; settings "
        f"below {percent(document['least_known'])} come last."
    )
    return wrapped(
        [
            heading,
            grid,
            "kept each, share: drafted tokens kept by a verification, and of all drafted.",
            "read: tokens attended; speed: tokens a byte; both beside full attention's.",
            known,
            "* what the traces' own runs did. triggers -: drafts end by their length alone.",
            f"Chosen: {chosen + 1}, {document['rule']}.",
        ]
    )


def _recorded(document: Row) -> Row:
    return {"triggers": "recorded", "measured": document["recorded"]}


def _cells(mark: str, row: Row) -> list[str]:
    values = [
        row.get(name) for name in ("triggers", "trigger_delay", "min_gap", "t_max", "max_tokens")
    ]
    known = row["predicted"]["known"] if "predicted" in row else None
    return [
        mark,
        *("-" if value is None else str(value) for value in values),
        *_outcome(row.get("predicted")),
        percent(known),
        *_outcome(row.get("measured")),
    ]


def _outcome(found: Row | None) -> list[str]:
    if found is None:
        return ["-"] * 4
    speed = number(found["speed"], 2) + "x"
    kept = number(found["accepted_per_verification"], 2)
    return [kept, percent(found["acceptance"]), percent(found["read_ratio"]), speed]
