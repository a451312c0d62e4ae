"""The tables of `sfi trace replay --refresh-every`, from its document."""

from typing import Any

from sfi_cli.commands.trace.replay.views import SETTINGS, heading, setting_cell
from sfi_cli.terminal.tables import count, number, percent, table, wrapped

COLUMNS = ("selected anew", "saved", "recall", "p5", "with new tokens", "worst layer", "worst")
MASSES = ("mass", "of its own")
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

Row = dict[str, Any]


def reuse_text(document: Row) -> str:
    """Return a row for each schedule, and the recall of the worst layers."""
    masses = document["masses"]
    random = f"A random selection would have a recall of {number(document['chance'])}."
    blocks: list[Any] = [heading(document), _rows_table(document), LEGEND, random]
    blocks += [LEGEND_MASSES] if masses else ["mass: not recorded."]
    if len(document["layers"]) > 1:
        blocks += ["", _layers_table(document)]
    return wrapped(blocks)


def _rows_table(document: Row) -> Any:
    columns = COLUMNS + (MASSES if document["masses"] else ())
    rows = [[_name(row), *_cells(row, masses=document["masses"])] for row in document["rows"]]
    return table("Selections reused", ("schedule", *columns), rows)


def _cells(row: Row, *, masses: bool) -> list[str]:
    worst = row["worst"] and "{recall:.3f} ({request} {step} {layer} {head})".format(**row["worst"])
    layer = row["worst_layer"]
    of_layer = {one["layer"]: one["recall"] for one in row["layers"]}
    return [
        count(row["runs"]),
        percent(row["saved"]),
        number(row["recall"]),
        number(row["recall_p5"]),
        number(row["recall_with_new"]),
        "-" if layer is None else f"{number(of_layer[layer])} ({layer})",
        worst or "-",
        *((number(row["retained_mass"]), number(row["own_mass"])) if masses else ()),
    ]


def _layers_table(document: Row) -> Any:
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
    return table(title, ("layer", *map(_name, rows)), cells)


def _name(row: Row) -> str:
    if row["every"] is not None:
        return "every step" if row["every"] == 1 else f"every {row['every']} steps"
    names = [name for name in row if name in SETTINGS and name not in ("policy", "slow_start")]
    said = [f"{SETTINGS[name]} {setting_cell(row[name])}" for name in names]
    return " ".join([row["policy"], *(f"({', '.join(said)})" for _ in said[:1])])
