"""The tables of `sfi trace replay --refresh-every`, from its document."""

from sfi_cli.commands.trace.replay.views import SETTINGS, heading, setting_cell, worst_cell
from sfi_cli.terminal.tables import Part
from sfi_traces.views.table import Columns, Row, Table, count, number, percent

MOST_LAYERS = 12  # the table by layer shows those with the least recall
LEGEND = (
    "recall: share of a step's own selection that is in the reused one, mean over the steps that reuse, "
    "their layers and heads; with new tokens: if all tokens since are read besides; worst: with its request, "
    "step, layer and head."
)
LEGEND_MASSES = (
    "mass: what the reused selection and these tokens hold of the step's dense attention, of recorded "
    "positions; of its own: what the step's own selection holds."
)


def reuse_text(document: Row) -> list[Part]:
    """Return a row for each schedule, and the recall of the worst layers."""
    masses = document["masses"]
    random = f"A random selection would have a recall of {number(document['chance'])}."
    columns = REUSED | (MASSES if masses else {})
    spare = ("worst", "p5", "worst layer", "saved")
    rows = Table.of("Selections reused", columns, document["rows"], spare=spare)
    parts: list[Part] = [heading(document), rows, LEGEND, random]
    parts += [LEGEND_MASSES] if masses else ["mass: not recorded."]
    if len(document["layers"]) > 1:
        parts += ["", _layers_table(document)]
    return parts


def _worst_layer(row: Row) -> str:
    layer = row["worst_layer"]
    of_layer = {one["layer"]: one["recall"] for one in row["layers"]}
    return "-" if layer is None else f"{number(of_layer[layer])} ({layer})"


def _layers_table(document: Row) -> Table:
    # a row for each layer, a column for each schedule
    rows = [row for row in document["rows"] if row["reused_steps"]]
    recall = {
        layer: [next(one["recall"] for one in row["layers"] if one["layer"] == layer) for row in rows]
        for layer in document["layers"]
    }
    worst = sorted(recall, key=lambda layer: [1.0 if one is None else one for one in recall[layer]])
    shown = sorted(worst[:MOST_LAYERS])
    title = "Recall by layer" + (f", the {len(shown)} lowest of {len(recall)}" if len(shown) < len(recall) else "")
    cells = [[str(layer), *map(number, recall[layer])] for layer in shown]
    return Table(title, ("layer", *map(_name, rows)), cells)


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
    "worst layer": _worst_layer,
    "worst": lambda row: worst_cell(row, "recall"),
}
MASSES: Columns = {"mass": (number, "retained_mass"), "of its own": (number, "own_mass")}
