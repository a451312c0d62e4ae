"""Tables of what the SyncKV and FreeKV papers observed, and of FreeKV's corrections, for `sfi trace show`."""

from sfi_cli.commands.trace.support_views import by_layer
from sfi_traces.views.table import Columns, Row, Table, count, duration, number, percent, span

MOST_LAYERS = 12  # of a matrix; --json has all
LOWEST_HEADS = 5


def drift_table(found: Row) -> Table:
    """Show how the overlap with the support of step 0 falls with the step."""
    title = f"Attention drift: overlap with the support of step 0{_layers(found)}"
    return Table.of(title, DRIFT, found["bins"])


def _layers(found: Row) -> str:
    taken, audited = found["layers_taken"], found["layers_audited"]
    return "" if taken == audited else f" ({taken:,} of {audited:,} audited layers, evenly chosen)"


def locality_table(found: Row) -> Table:
    """Show how the overlap of two steps falls with their distance."""
    title = f"Temporal locality: overlap of every two audited steps{_layers(found)}"
    return Table.of(title, LOCALITY, found["lags"])


def head_similarity_table(found: Row) -> Table | str:
    """Show the similarity of heads by pair of layers, and its means within and between layers."""
    layers, matrix = found["layers"], found["matrix"]
    few = len(layers) <= MOST_LAYERS
    rows = [
        (str(layer), *(number(value, 2) for value in row)) for layer, row in zip(layers, matrix, strict=True) if few
    ]
    title = (
        f"Similarity of heads at the same step: {number(found['within'])} within a layer, "
        f"{number(found['between'])} between layers ({found['steps']:,} steps), "
        f"{number(_mean(found['previous_layer']))} with the layer before"
    )
    if not few:
        return f"{title}; --json has the {len(layers)} layers\n"
    return Table(title, ("layer", *map(str, layers)), rows)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def query_cosine_table(found: Row) -> Table:
    """Show by layer the query cosine, and how often FreeKV would correct."""
    rows = [
        (place, number(one["mean"]), number(one["min"]), *(percent(share) for share in one["below"]), count(one["n"]))
        for place, one in by_layer(found)
    ]
    title = "Query cosine with the step before; FreeKV corrects where it is under tau"
    under = (f"under {tau:g}" for tau in found["thresholds"])
    return Table(title, ("layer", "mean", "min", *under, "n"), rows)


def lowest_heads_line(found: Row) -> str:
    """Name the KV heads with the lowest query cosine."""
    heads = (
        f"layer {head['layer']} head {head['head']} {number(head['mean'])}" for head in found["heads"][:LOWEST_HEADS]
    )
    return f"lowest query cosine in {', '.join(heads)}\n"


def correction_table(found: Row) -> Table:
    """Show how often heads were corrected, by layer and by distance from the last slow step."""
    places = [("all", found), *((f"layer {one['layer']}", one) for one in found["layers"])]
    places += [(f"{span(one['from_step'], one['to_step'])} after a slow step", one) for one in found["since_slow"]]
    rows = [(place, percent(one["share"]), count(one["corrected"]), count(one["n"])) for place, one in places]
    cosine = number(found["query_cosine"])
    title = f"Corrections of fast steps x layers x KV heads; their query cosine is {cosine} on average"
    return Table(title, ("", "corrected", "corrections", "n"), rows)


def recall_line(found: Row) -> str:
    """Say how much KV was recalled from the host, and how long steps waited for it."""
    return (
        f"recalled from the host: {number(found['step_bytes'], 0)} bytes a step ({count(found['rows'])} rows "
        f"in {count(found['steps'])} steps), waited {duration(found['step_waited_us'])} a step\n"
    )


DRIFT: Columns = {
    "step": lambda one: span(one["from_step"], one["to_step"]),
    "mean": (number, "mean"),
    "n": (count, "n"),
}
LOCALITY: Columns = {
    "steps apart": lambda one: span(one["from_lag"], one["to_lag"]),
    "mean": (number, "mean"),
    "pairs": (count, "pairs"),
}
