"""The tables of `sfi trace replay`, from its document."""

import io
import shutil
from typing import Any

LEAST_WIDTH = 110
SETTINGS = {  # heading of a setting's column
    "policy": "trigger policy", "triggers": "triggers", "t_max": "T_max", "min_gap": "gap",
    "trigger_delay": "delay", "slow_start": "slow start", "stride": "stride", "cosine_threshold": "cosine",
    "random_rate": "rate", "seed": "seed", "budget": "budget", "recent": "recent", "recent_mode": "mode",
    "sink": "sink", "span": "span",
}  # fmt: skip
OUTCOME = ("slow", "kept", "at most", "p5", "overlap", "read", "MB/token", "speed-up")


def replay_text(document: dict[str, Any]) -> str:
    """Return the replayed settings, fastest first, and what a real run measured."""
    blocks: list[Any] = [_heading(document)]
    if document["rows"]:
        blocks += [_rows_table(document), _legend(document)]
    if document["validation"] is not None:
        blocks += [_validation_table(document), *_validation_notes(document["validation"])]
    return _rendered(blocks)


def _heading(document: dict[str, Any]) -> str:
    requests = document["requests"]
    which = f"request {requests[0]['request']}" if len(requests) == 1 else f"{len(requests)} requests"
    prompt = max(request["prompt_tokens"] for request in requests)
    steps = sum(request["steps"] for request in requests)
    return (
        f"{document['trace']}: {document['model']}, recorded with {document['policy']}; {which}, up to "
        f"{prompt:,} prompt tokens, {steps:,} steps, {document['heads']} KV heads of "
        f"{len(document['layers'])} layers, top {document['audit_top']:,}"
    )


def _rows_table(document: dict[str, Any]) -> Any:
    rows = document["rows"]
    varied = [name for name in SETTINGS if len({str(row[name]) for row in rows}) > 1]
    table = _table("Replayed settings", document["batch"])
    table.add_column("", no_wrap=True)
    for name in varied:
        table.add_column(SETTINGS[name], justify="left" if name in ("policy", "triggers") else "right")
    for heading in OUTCOME:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("worst", no_wrap=True)
    for row in rows:
        mark = ("*" if row["recorded"] else " ") + ("+" if row["pareto"] else "")
        table.add_row(mark, *(_value(row[name]) for name in varied), *_outcome(row))
    return table


def _legend(document: dict[str, Any]) -> str:
    rows = document["rows"]
    same = [
        f"{SETTINGS[name]} {_value(rows[0][name])}"
        for name in SETTINGS
        if len({str(row[name]) for row in rows}) == 1 and rows[0][name] is not None
    ]
    lines = [f"In all rows: {', '.join(same)}."] if same else []
    lines.append(
        "kept: retained mass of fast steps, at least. + no other row is faster and keeps as much."
    )
    if any(row["recorded"] for row in rows):
        lines.append("* the trace's own setting.")
    return "\n".join(lines) + "\n"


def _validation_table(document: dict[str, Any]) -> Any:
    run = document["against"] or document["trace"]
    table = _table(f"The setting of {run}: predicted and measured", document["batch"])
    table.add_column("")
    for heading in OUTCOME:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("worst", no_wrap=True)
    for name in ("predicted", "measured"):
        table.add_row(name, *_outcome(document["validation"][name]))
    return table


def _validation_notes(validation: dict[str, Any]) -> list[str]:
    lines = []
    for one in validation["requests"]:
        least = min(one["recorded_steps"], one["measured_steps"])
        text = f"request {one['request']}: {one['steps']} of {least} steps compared"
        lines.append(text + (", up to the first other token" if one["steps"] < least else ""))
    schedule = "the same slow steps" if validation["same_schedule"] else "OTHER SLOW STEPS"
    text = f"{schedule} predicted and measured"
    if validation["mean_difference"] is not None:
        text += (
            f"; kept, predicted less measured: mean {validation['mean_difference']:+.4f}, "
            f"mean distance {validation['mean_distance']:.4f}"
        )
    return [*lines, text]


def _outcome(row: dict[str, Any]) -> list[str]:
    worst, overlap = row["worst"], row["overlap_at_reuse"]
    place = "" if worst is None else (
        f"{worst['retained_mass']:.3f}  request {worst['request']} step {worst['step']} "
        f"layer {worst['layer']} head {worst['head']}"
    )  # fmt: skip
    return [
        f"{row['slow_rate']:.1%}",
        f"{row['retained_mass']:.3f}",
        f"{row['retained_mass_upper']:.3f}",
        f"{row['retained_mass_p5']:.3f}",
        "-" if overlap is None else f"{overlap:.3f}",
        f"{row['attended_tokens']:,.0f} ({row['read_ratio']:.1%})",
        f"{row['bytes_per_token'] / 1e6:,.1f}",
        f"{row['speedup']:.2f}x",
        place or "-",
    ]


def _value(value: Any) -> str:
    return "-" if value is None else str(value).replace("\n", "\\n")


def _table(title: str, batch: int) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(
        title=f"{title} (byte model: batch {batch})",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )


def _rendered(blocks: list[Any]) -> str:
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=max(LEAST_WIDTH, shutil.get_terminal_size().columns),
        color_system=None,
        markup=False,
        emoji=False,
        highlight=False,
    )  # a trigger may look like markup
    for block in blocks:
        console.print(block)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "".join(f"{line.rstrip()}\n" for line in lines)
