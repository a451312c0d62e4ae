"""The tables of `sfi tune`, from its document."""

from functools import partial

from sfi_cli.commands.trace.replay.views import OUTCOME, everywhere, texts_of, varied
from sfi_cli.terminal.tables import Part
from sfi_traces.views.table import Columns, Row, Table, number, percent, plural

ROWS = 16  # of the front
LEFT_OUT = ("worst", "overlap")  # columns of a replay that the front does not show
ANSWERS = {True: "right", False: "WRONG", None: "-"}


def tune_text(document: Row) -> list[Part]:
    """Return the front, the real runs and the chosen setting."""
    parts: list[Part] = [_heading(document), "", _front(document)]
    parts += _legend(document)
    if document["confirmed"]:
        title = "Run for real: retained mass of fast steps, predicted (at least) and measured, over compared steps"
        spare = ("may be off by", "steps", "kept, predicted", "slow")
        parts += ["", Table.of(title, CONFIRMED, document["confirmed"], spare=spare), *_confirmed_notes(document)]
    place = next(i for i, row in enumerate(document["front"], 1) if row["chosen"])
    run = f" Run it with --policy {document['policy']}." if document["policy"] != "sfi" else ""
    return [*parts, "", f"Chosen: {place}, {document['rule']}.{run}"]


def _heading(document: Row) -> str:
    objectives = ", ".join(f"{objective['direction']} {objective['name']}" for objective in document["objectives"])
    return (
        f"{', '.join(document['traces'])}: {document['model']}, {plural(document['requests'], 'request')}, "
        f"{plural(document['steps'], 'step')}; {plural(document['trials'], 'trial')} in {document['study']}, "
        f"{document['distinct_trials']:,} of them different; {objectives}"
    )


def _front(document: Row) -> Table:
    front = document["front"]
    confirmed = {row["place"] for row in document["confirmed"]}
    shown = _shown(front, confirmed)
    rows = [{"": f"{at + 1}{' >' * front[at]['chosen']}{' x' * (at in confirmed)}", **front[at]} for at in shown]
    rows.append({"": "*", **document["recorded"]})
    more = f", {len(shown)} of {len(front)} settings shown" if len(shown) < len(front) else ""
    title = f"Pareto front as replayed, cheapest first{more} (byte model: batch {document['batch']})"
    settings = varied(rows)
    outcome = {name: column for name, column in OUTCOME.items() if name not in LEFT_OUT}
    columns = {"": (str, "")} | settings | outcome
    return Table.of(title, columns, rows, left=1 + texts_of(settings), spare=("p5", "at most", "MB/token"))


def _shown(front: list[Row], confirmed: set[int]) -> list[int]:
    # places evenly over the front, with the chosen and the confirmed settings
    wanted = confirmed | {place for place, row in enumerate(front) if row["chosen"]}
    step = max(1, -(-len(front) // ROWS))
    return sorted(wanted | set(range(0, len(front), step)) | {len(front) - 1})


def _legend(document: Row) -> list[str]:
    whole, budget = document["recorded_budget"], document["recorded"]["budget"]
    cut = f", but for its budget of {whole:,}: the audit recorded {budget:,}" if budget < whole else ""
    marks = f"* the trace's own setting{cut}; > chosen; x run for real."
    return [*everywhere([*document["front"], document["recorded"]]), marks]


def _confirmed_notes(document: Row) -> list[str]:
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


CONFIRMED: Columns = {
    "": lambda row: str(row["place"] + 1),
    "slow": lambda row: percent(row["measured"]["slow_rate"]),
    "kept, predicted": lambda row: number(row["predicted"]["retained_mass"]),
    "may be off by": (number, "stated_error"),
    "measured": lambda row: number(row["measured"]["retained_mass"]),
    "off by": lambda row: f"{row['error']:+.3f}" + ("" if row["within"] in (True, None) else " !"),
    "steps": lambda row: f"{row['steps']} of {row['recorded_steps']}",
    "KL": (partial(number, digits=4), "kl_next_token"),
    "argmax": (percent, "argmax_agreement"),
    "tokens/s": (partial(number, digits=1), "decode_tokens_per_second"),
    "answer": (ANSWERS.__getitem__, "exact_match"),
}
