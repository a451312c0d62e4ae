"""The tables of `sfi trace replay`, from its documents."""

from collections.abc import Sequence
from typing import Any

from sfi_cli.terminal.tables import Part
from sfi_traces.views.table import Columns, Row, Table, count, number, percent, ratio

SETTINGS = {  # heading of a setting's column
    "policy": "trigger policy", "triggers": "triggers", "t_max": "T_max", "min_gap": "gap",
    "trigger_delay": "delay", "slow_start": "slow start", "stride": "stride",
    "random_rate": "rate", "trigger_seed": "seed", "budget": "budget",
    "recent": "recent", "recent_mode": "mode", "sink": "sink", "span": "span",
    "page_size": "page",
}  # fmt: skip
SPARE = ("worst", "p5", "at most", "MB/token", "overlap")  # columns of an outcome
KEPT = "kept: retained mass of fast steps, at least, mean and p5; worst: with its request, step, layer and head."
LEGEND = (
    "recall: share of a step's own selection that is in the reused one, mean over the steps that reuse, their layers "
    "and heads; with new tokens: if all tokens since are read besides; worst: with its request, step, layer and head."
)
LEGEND_MASSES = (
    "mass: what the reused selection and these tokens hold of the step's dense attention, of recorded "
    "positions; of its own: what the step's own selection holds."
)


def replay_text(document: Row) -> list[Part]:
    """Return the replayed settings, fastest first, then predicted beside measured for a real run."""
    parts: list[Part] = [heading(document)]
    if rows := document["rows"]:
        settings, words = varied(rows)
        columns = (
            {"": lambda row: ("*" if row["recorded"] else " ") + ("+" if row["pareto"] else "")} | settings | OUTCOME
        )
        title = "Replayed settings (byte model: batch 1)"
        parts += [Table.of(title, columns, rows, left=1 + words, spare=SPARE), *everywhere(rows)]
        parts += [KEPT, "+ no other row is faster and keeps as much."]
        if any(row["recorded"] for row in rows):
            parts.append("* the trace's own setting.")
        left_out, cut, top = document["budgets_left_out"], document["budget_cut_from"], document["audit_top"]
        if left_out or cut:
            what = (
                f"budget {cut:,} is replayed as {top:,}" if cut else f"left out budget {', '.join(map(str, left_out))}"
            )
            advice = f"--set audit.top={cut or left_out[-1]} records as many."
            parts.append(f"{what}: the audit recorded {top:,} positions; {advice}")
        parts.append("")
    if document["validation"] is not None:
        title = f"The setting of {document['against'] or document['trace']}: predicted and measured"
        rows = [{"": name, **document["validation"][name]} for name in ("predicted", "measured")]
        table = Table.of(f"{title} (byte model: batch 1)", {"": (str, "")} | OUTCOME, rows, spare=SPARE)
        parts += [table, *_validation_notes(document)]
    return parts


def heading(document: Row) -> str:
    """Say which part of which trace is replayed."""
    requests = document["requests"]
    which = f"request {requests[0]['request']}" if len(requests) == 1 else f"{len(requests)} requests"
    prompt = max(request["prompt_tokens"] for request in requests)
    steps = sum(request["steps"] for request in requests)
    policy = document["policy"]
    how = policy if policy == "imported" else f"recorded with {policy}"
    return (
        f"{document['trace']}: {document['model']}, {how}; {which}, up to {prompt:,} prompt tokens, {steps:,} steps, "
        f"{len(document['layers'])} layers with {document['heads']} KV heads in all, top {document['audit_top']:,}"
    )


def varied(rows: Sequence[Row]) -> tuple[Columns, int]:
    """Return a column for each setting that differs among the rows, and how many of them are words."""
    columns: Columns = {
        heading: (setting_cell, name) for name, heading in SETTINGS.items() if len(_values(rows, name)) > 1
    }
    return columns, len({"trigger policy", "triggers"} & columns.keys())


def everywhere(rows: Sequence[Row]) -> list[str]:
    """Return a line with the settings that all rows have in common; [] without any."""
    values = {heading: _values(rows, name) for name, heading in SETTINGS.items()}
    same = [f"{heading} {given[0]}" for heading, given in values.items() if len(given) == 1]
    return [f"Everywhere: {', '.join(same)}."] if same else []


def _validation_notes(document: Row) -> list[str]:
    lines, validation = [], document["validation"]
    for request in validation["requests"]:
        least = min(request["recorded_steps"], request["measured_steps"])
        text = f"request {request['request']}: {request['steps']} of {least} steps compared"
        lines.append(text + (", up to the first other token" if request["steps"] < least else ""))
    schedule = "the same slow steps" if validation["same_schedule"] else "OTHER SLOW STEPS"
    text = f"{schedule} predicted and measured"
    if validation["mean_difference"] is not None:
        text += (
            f"; kept, predicted less measured: mean {validation['mean_difference']:+.4f}, "
            f"mean distance {validation['mean_distance']:.4f}"
        )
    if document["against_top"] not in (None, document["audit_top"]):
        lines.append("overlap: not compared, since audit.top of the two traces differs")
    return [*lines, text]


def worst_cell(row: Row, name: str = "retained_mass") -> str:
    """Write a row's worst value, with its request, step, layer and head; a dash without one."""
    worst = row["worst"]
    return f"{worst[name]:.3f} ({{request}} {{step}} {{layer}} {{head}})".format(**worst) if worst else "-"


def _values(rows: Sequence[Row], name: str) -> list[str]:
    # each once, of the rows whose trigger policy uses the setting
    return list(dict.fromkeys(setting_cell(row[name]) for row in rows if row[name] is not None))


def setting_cell(value: Any) -> str:
    """Write a setting's value; a dash if the row's trigger policy does not use it."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value is None else str(value).replace("\n", "\\n")


OUTCOME: Columns = {
    "slow": (percent, "slow_rate"),
    "kept": (number, "retained_mass"),
    "at most": (number, "retained_mass_upper"),
    "p5": (number, "retained_mass_p5"),
    "worst": worst_cell,
    "overlap": (number, "overlap_at_reuse"),
    "read": lambda row: f"{row['attended_tokens']:,.0f} ({row['read_ratio']:.1%})",
    "MB/token": lambda row: number(row["bytes_per_token"] / 1e6, 1),
    "speed-up": (ratio, "speedup"),
}


def reuse_text(document: Row) -> list[Part]:
    """Return a row for each schedule."""
    masses = document["masses"]
    random = f"A random selection would have a recall of {number(document['chance'])}."
    columns = REUSED | (MASSES if masses else {})
    rows = Table.of("Selections reused", columns, document["rows"], spare=("worst", "p5", "saved"))
    return [heading(document), rows, LEGEND, random, LEGEND_MASSES if masses else "mass: not recorded."]


def _name(row: Row) -> str:
    if row["every"] is not None:
        return "every step" if row["every"] == 1 else f"every {row['every']} steps"
    names = [name for name in row if name in SETTINGS and name not in ("policy", "slow_start")]
    said = [f"{SETTINGS[name]} {setting_cell(row[name])}" for name in names]
    return " ".join([row["policy"], *(f"({', '.join(said)})" for _ in said[:1])])


REUSED: Columns = {
    "schedule": _name,
    "selected anew": (count, "runs"),
    "saved": (percent, "saved"),
    "recall": (number, "recall"),
    "p5": (number, "recall_p5"),
    "with new tokens": (number, "recall_with_new"),
    "worst": lambda row: worst_cell(row, "recall"),
}
MASSES: Columns = {"mass": (number, "retained_mass"), "of its own": (number, "own_mass")}
