"""The tables of `sfi trace replay`, from its document."""

from typing import Any

from sfi_cli.terminal.tables import number, percent, ratio, table, wrapped

SETTINGS = {  # heading of a setting's column
    "policy": "trigger policy", "triggers": "triggers", "t_max": "T_max", "min_gap": "gap",
    "trigger_delay": "delay", "slow_start": "slow start", "stride": "stride",
    "random_rate": "rate", "trigger_seed": "seed", "budget": "budget",
    "recent": "recent", "recent_mode": "mode", "sink": "sink", "span": "span",
    "page_size": "page",
}  # fmt: skip
OUTCOME = ("slow", "kept", "at most", "p5", "worst", "overlap", "read", "MB/token", "speed-up")
KEPT = (
    "kept: retained mass of fast steps, at least, mean and 5th percentile; worst: with its request, step, "
    "layer and head."
)


def replay_text(document: dict[str, Any]) -> str:
    """Return the replayed settings, fastest first, then predicted beside measured for a real run."""
    blocks: list[Any] = [heading(document)]
    if document["rows"]:
        blocks += [_rows_table(document), *_legend(document), ""]
    if document["validation"] is not None:
        blocks += [_validation_table(document), *_validation_notes(document["validation"])]
    return wrapped(blocks)


def heading(document: dict[str, Any]) -> str:
    """Say which part of which trace is replayed."""
    requests = document["requests"]
    which = f"request {requests[0]['request']}" if len(requests) == 1 else f"{len(requests)} requests"
    prompt = max(request["prompt_tokens"] for request in requests)
    steps = sum(request["steps"] for request in requests)
    policy = document["policy"]
    how = policy if policy == "imported" else f"recorded with {policy}"
    return (
        f"{document['trace']}: {document['model']}, {how}; {which}, up to "
        f"{prompt:,} prompt tokens, {steps:,} steps, {len(document['layers'])} layers with "
        f"{document['heads']} KV heads in all, top {document['audit_top']:,}"
    )


def _rows_table(document: dict[str, Any]) -> Any:
    rows = document["rows"]
    varied = [name for name in SETTINGS if len(setting_values(rows, name)) > 1]
    texts = len({"policy", "triggers"} & set(varied))
    return table(
        _title("Replayed settings", document),
        ["", *(SETTINGS[name] for name in varied), *OUTCOME],
        [
            [
                ("*" if row["recorded"] else " ") + ("+" if row["pareto"] else ""),
                *(setting_cell(row[name]) for name in varied),
                *outcome_cells(row),
            ]
            for row in rows
        ],
        left=1 + texts,
    )


def _legend(document: dict[str, Any]) -> list[str]:
    rows = document["rows"]
    values = {name: setting_values(rows, name) for name in SETTINGS}
    same = [f"{SETTINGS[name]} {one[0]}" for name, one in values.items() if len(one) == 1]
    lines = [f"Everywhere: {', '.join(same)}."] if same else []
    lines += [KEPT, "+ no other row is faster and keeps as much."]
    if any(row["recorded"] for row in rows):
        lines.append("* the trace's own setting.")
    return lines


def _validation_table(document: dict[str, Any]) -> Any:
    run = document["against"] or document["trace"]
    return table(
        _title(f"The setting of {run}: predicted and measured", document),
        ["", *OUTCOME],
        [[name, *outcome_cells(document["validation"][name])] for name in ("predicted", "measured")],
    )


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


def outcome_cells(row: dict[str, Any]) -> list[str]:
    """Write an outcome, in the order of `OUTCOME`."""
    worst = row["worst"] and ("{retained_mass:.3f} ({request} {step} {layer} {head})".format(**row["worst"]))
    return [
        percent(row["slow_rate"]),
        number(row["retained_mass"]),
        number(row["retained_mass_upper"]),
        number(row["retained_mass_p5"]),
        worst or "-",
        number(row["overlap_at_reuse"]),
        f"{row['attended_tokens']:,.0f} ({row['read_ratio']:.1%})",
        number(row["bytes_per_token"] / 1e6, 1),
        ratio(row["speedup"]),
    ]


def setting_values(rows: list[dict[str, Any]], name: str) -> list[str]:
    """Return a setting's values, each once, in the rows whose trigger policy uses it."""
    return list(dict.fromkeys(setting_cell(row[name]) for row in rows if row[name] is not None))


def setting_cell(value: Any) -> str:
    """Write a setting's value; a dash if the row's trigger policy does not use it."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value is None else str(value).replace("\n", "\\n")


def _title(text: str, document: dict[str, Any]) -> str:
    return f"{text} (byte model: batch {document['batch']})"
