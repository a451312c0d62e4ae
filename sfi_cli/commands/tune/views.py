"""The tables of `sfi tune`, from its document."""

from typing import Any

from sfi_cli.commands.trace.replay.views import OUTCOME, SETTINGS, outcome_cells, setting_cell, setting_values
from sfi_cli.terminal.tables import number, percent, plural, table, wrapped

ROWS = 16  # of the front
LEFT_OUT = ("worst", "overlap")  # columns of a replay that the front does not show
CONFIRMED = ("", "slow", "kept, predicted", "may be off by", "measured", "off by", "steps", "KL", "argmax",
             "tokens/s", "answer")  # fmt: skip
ANSWERS = {True: "right", False: "WRONG", None: "-"}


def tune_text(document: dict[str, Any]) -> str:
    """Return the front, the real runs and the chosen setting."""
    blocks: list[Any] = [_heading(document), "", _front(document)]
    blocks += _legend(document)
    if document["confirmed"]:
        blocks += ["", _confirmed(document), *_confirmed_notes(document)]
    place = next(i for i, row in enumerate(document["front"], 1) if row["chosen"])
    return wrapped([*blocks, "", f"Chosen: {place}, {document['rule']}."])


def _heading(document: dict[str, Any]) -> str:
    objectives = ", ".join(f"{one['direction']} {one['name']}" for one in document["objectives"])
    return (
        f"{', '.join(document['traces'])}: {document['model']}, {plural(document['requests'], 'request')}, "
        f"{plural(document['steps'], 'step')}; {plural(document['trials'], 'trial')} in {document['study']}, "
        f"{document['distinct_trials']:,} of them different; {objectives}"
    )


def _front(document: dict[str, Any]) -> Any:
    front = document["front"]
    confirmed = {row["place"] for row in document["confirmed"]}
    shown = _shown(front, confirmed)
    rows = [(str(place + 1), front[place], place in confirmed) for place in shown]
    rows.append(("*", document["recorded"], False))
    varied = [name for name in SETTINGS if len(setting_values([row for _, row, _ in rows], name)) > 1]
    more = f", {len(shown)} of {len(front)} settings shown" if len(shown) < len(front) else ""
    return table(
        f"Pareto front as replayed, cheapest first{more} (byte model: batch {document['batch']})",
        ["", *(SETTINGS[name] for name in varied), *(n for n in OUTCOME if n not in LEFT_OUT)],
        [
            [
                name + (" >" if row.get("chosen") else "") + (" x" if ran else ""),
                *(setting_cell(row[name]) for name in varied),
                *(cell for n, cell in zip(OUTCOME, outcome_cells(row), strict=True) if n not in LEFT_OUT),
            ]
            for name, row, ran in rows
        ],
        left=1 + len({"policy", "triggers"} & set(varied)),
    )


def _shown(front: list[dict[str, Any]], confirmed: set[int]) -> list[int]:
    # places evenly over the front, with the chosen and the confirmed settings
    wanted = confirmed | {place for place, row in enumerate(front) if row["chosen"]}
    step = max(1, -(-len(front) // ROWS))
    return sorted(wanted | set(range(0, len(front), step)) | {len(front) - 1})


def _legend(document: dict[str, Any]) -> list[str]:
    rows = [*document["front"], document["recorded"]]
    same = [f"{SETTINGS[name]} {values[0]}" for name in SETTINGS if len(values := setting_values(rows, name)) == 1]
    own, budget = document["recorded_budget"], document["recorded"]["budget"]
    cut = f", but for its budget of {own:,}: the audit recorded {budget:,}" if budget < own else ""
    marks = f"* the trace's own setting{cut}; > chosen; x run for real."
    return [*([f"Everywhere: {', '.join(same)}."] if same else []), marks]


def _confirmed(document: dict[str, Any]) -> Any:
    return table(
        "Run for real: retained mass of fast steps, predicted (at least) and measured, over compared steps",
        CONFIRMED,
        [
            [
                str(row["place"] + 1),
                percent(row["measured"]["slow_rate"]),
                number(row["predicted"]["retained_mass"]),
                number(row["stated_error"]),
                number(row["measured"]["retained_mass"]),
                f"{row['error']:+.3f}" + ("" if row["within"] in (True, None) else " !"),
                f"{row['steps']} of {row['recorded_steps']}",
                number(row["kl_next_token"], 4),
                percent(row["argmax_agreement"]),
                number(row["decode_tokens_per_second"], 1),
                ANSWERS[row["exact_match"]],
            ]
            for row in document["confirmed"]
        ],
    )


def _confirmed_notes(document: dict[str, Any]) -> list[str]:
    rows = document["confirmed"]
    mean = sum(abs(row["error"]) for row in rows) / len(rows)
    lines = [
        f"off by: predicted less measured, its size on average {mean:.3f}.",
        "may be off by: the width of the replay's bounds and the largest error of the other rows.",
        "steps: compared ones, up to the first token that differs from the trace's.",
        f"Full attention: {document['full_kv_tokens_per_second']:,.1f} tokens/s.",
    ]
    if any(row["within"] is False for row in rows):
        lines.append("! further off than stated.")
    chosen = [row for row in rows if document["front"][row["place"]]["chosen"]]
    if any(row["steps"] < row["recorded_steps"] for row in chosen):
        lines.append("The chosen setting writes other tokens than the trace: read them before you use it.")
    return lines
