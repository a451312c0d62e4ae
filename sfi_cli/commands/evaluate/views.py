"""The tables of `sfi eval`, from its document."""

from functools import partial
from typing import Any

from sfi_cli.terminal.tables import Part
from sfi_traces.results import grouped
from sfi_traces.views.table import Column, Columns, Row, Table, number, percent, plural, written

# sizes of rows that hold at all sizes: full attention, methods with own sizes
ANY_SIZE = ("all", "own")
NOTES = (
    "score: mean and 95 % Wilson interval; against full-kv: paired difference, 95 % bootstrap interval.",
    "read: what attention and selection read over the context, with slow steps; stored: what has to be kept.",
)


def evaluation_text(document: dict[str, Any]) -> list[Part]:
    """Return the tables of the tasks and of the text, notes on the columns, and the failures."""
    parts: list[Part] = [_heading(document), ""]
    rows = document["rows"]
    for (task, length), group in grouped(rows, ("task", "length")).items():
        samples = max(row["n"] + row["failed"] for row in group)
        title = f"{task}, {length:,} tokens, {plural(samples, 'sample')}"
        measures = dict.fromkeys(name for row in group for name in row["scores"])
        costs: Columns = {name.replace("_", " "): partial(_measure, name) for name in measures} | COSTS
        parts.append(_by_size(title, group, SCORE, ("against full-kv", _difference), "95 %"))
        parts.append(_by_size("", group, costs, ("tokens/s", SPEED), "stored"))
    parts += NOTES if rows else ()
    for (length,), group in grouped(document["fidelity"], ("length",)).items():
        windows = f"{plural(group[0]['windows'], 'window')} of {group[0]['tokens']:,} tokens"
        title = f"fidelity to full attention, {length:,} prompt tokens, {windows}"
        parts.append(Table.of(title, FIDELITY, group, left=2, spare=("stored", "slow", "full-kv's")))
    return parts + [_failure(row) for name in ("rows", "fidelity") for row in document[name] if row["failed"]]


def _heading(document: Row) -> str:
    machine = document["machine"]
    where = machine["processor"]
    if document["device"].startswith("cuda"):
        where = ", ".join(dict.fromkeys(machine["gpus"]))
    done = "" if document["finished"] else f"; not complete: {document['stopped'] or 'running'}"
    return f"{document['results']}: {document['model']['name']} on {where}{done}"


def _by_size(title: str, rows: list[Row], columns: Columns, last: tuple[str, Column], spare: str) -> Table:
    # a line for each method, with the columns at each size and a last one; a row for all sizes stands at each
    known = [*dict.fromkeys(row["size"] for row in rows)]
    sizes = [size for size in known if size not in ANY_SIZE] or known[-1:]
    final = last[0] if len(sizes) == 1 else f"{last[0]} at {sizes[-1]}"
    head = ["method", *(f"{name} at {size}" for size in sizes for name in columns), final]
    lines = []
    for (method,), group in grouped(rows, ("method",)).items():
        by_size = {row["size"]: row for row in group}
        always = next((row for row in group if row["size"] in ANY_SIZE), None)
        at = [by_size.get(size, always) for size in sizes]
        cells: list[tuple[Row | None, Column]] = [(row, column) for row in at for column in columns.values()]
        cells.append((at[-1], last[1]))
        scored = [written(column, row) if row and row["score"] is not None else "-" for row, column in cells]
        lines.append([method, *scored])
    return Table(title, head, lines, spare=[name for name in head if name.startswith(spare)])


def _measure(name: str, row: Row) -> str:
    return number(row["scores"].get(name), 2)


def _difference(row: Row) -> str:
    if row["difference"] is None:
        return "-"
    return f"{row['difference']:+.2f} ({row['difference_low']:+.2f} to {row['difference_high']:+.2f})"


def _failure(row: Row) -> str:
    count = f" ({row['failed']} times)" if row["failed"] > 1 else ""
    where = f"{row.get('task', 'fidelity')}, {row['length']:,} tokens"
    return f"failed{count}: {row['method']} at {row['size']}, {where}: {row['error']}"


_two, _four = partial(number, digits=2), partial(number, digits=4)
SCORE: Columns = {"score": (_two, "score"), "95 %": lambda row: f"{row['low']:.2f}-{row['high']:.2f}"}
SPEED: Column = (partial(number, digits=1), "tokens_per_second")
COSTS: Columns = {"read": (percent, "read"), "stored": (percent, "stored_ratio")}
FIDELITY: Columns = {
    "method": (str, "method"),
    "size": (str, "size"),
    "KL": (_four, "kl"),
    "KL p95": (_four, "kl_p95"),
    "agreement": (percent, "agreement"),
    "perplexity": (_two, "perplexity"),
    "full-kv's": (_two, "perplexity_full"),
    "slow": (percent, "slow_rate"),
    "read": (percent, "read"),
    "stored": (percent, "stored_ratio"),
}
