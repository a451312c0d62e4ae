"""The tables of two traces beside each other, for `sfi trace diff` and its page."""

from collections.abc import Callable
from functools import partial
from typing import Any

from sfi_traces.views.table import Row, Table, count, duration, number, percent, ratio

NUMBERS: dict[str, tuple[str, Callable[[Any], str]]] = {  # title: name, function that writes it
    "steps": ("steps", count),
    "slow steps": ("slow", count),
    "share of slow steps": ("slow_share", percent),
    "cache read": ("cache_read_ratio", percent),
    "retained mass of fast steps": ("retained_mass", number),
    "lambda*": ("lambda_star", partial(number, digits=4)),
    "prefill": ("prefill_p50_us", duration),
    "slow step, p50": ("slow_p50_us", duration),
    "fast step, p50": ("fast_p50_us", duration),
    "tokens/s": ("tokens_per_second", partial(number, digits=1)),
}
SPREAD = ("mean", "sd", "p5", "p50", "p95")


def numbers_table(document: Row) -> Table:
    """Show the numbers of both, and what B's are over A's."""
    sides = document["a"], document["b"]
    rows = [("policy", *(side["policy"] for side in sides), "")]
    for title, (name, write) in NUMBERS.items():
        factor = document["ratios"].get(name)
        rows.append((title, *(write(side[name]) for side in sides), "" if factor is None else ratio(factor)))
    rows.append(("audit's cost in times", *("yes" if side["audited"] else "no" for side in sides), ""))
    return Table("", ("", "A", "B", "B / A"), rows)


def overlap_tables(document: Row) -> list[Table]:
    """Show by layer how far supports and selections overlap; [] if neither was recorded in both."""
    tables = []
    for name in ("supports", "selections"):
        if found := document[name]:
            layers = [("all", found["overlap"]), *((str(one["layer"]), one["overlap"]) for one in found["layers"])]
            rows = [(place, *(number(values[of]) for of in SPREAD), count(values["n"])) for place, values in layers]
            cut = document["supports_cut_to"] if name == "supports" else None
            title = f"Overlap of the {name} at equal steps" + (f", both cut to the top {cut:,}" if cut else "")
            tables.append(Table(title, ("layer", *SPREAD, "n"), rows))
    return tables


def place_words(layer: Row) -> str:
    """Describe a request's `first_layer` in words."""
    heads = ", ".join(map(str, layer["heads"]))
    what = "other positions" if layer["positions"] else "another retained mass"
    return f"step {layer['step']:,}: layer {layer['layer']}, KV head {heads}, {what} in {layer['table']}"
