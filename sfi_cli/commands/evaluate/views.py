"""The tables of `sfi eval`, from its document."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from sfi_cli.terminal.tables import Part
from sfi_traces.views.table import Columns, Row, Table, number, percent, plural

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
    for (task, length), group in _groups(rows, ("task", "length")):
        samples = max(row["n"] + row["failed"] for row in group)
        title = f"{task}, {length:,} tokens, {plural(samples, 'sample')}"
        parts += [_scores(title, group), _costs(group)]
    parts += NOTES if rows else ()
    for (length,), group in _groups(document["fidelity"], ("length",)):
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


def _groups(rows: Iterable[Row], names: Sequence[str]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.items())


def _scores(title: str, rows: list[Row]) -> Table:
    # where there is no room, without the intervals but that of the last size
    sizes = _sizes(rows)
    last = "" if len(sizes) == 1 else f" at {sizes[-1]}"
    columns = ["method", *(f"{name} at {size}" for size in sizes for name in SCORE), f"against full-kv{last}"]
    lines = [
        [method, *(_cell(row, write) for row in line for write in SCORE.values()), _cell(line[-1], _difference)]
        for method, line in _lines(rows, sizes)
    ]
    return Table(title, columns, lines, spare=columns[2:-2:2])


def _costs(rows: list[Row]) -> Table:
    sizes = _sizes(rows)
    further = list(dict.fromkeys(name for row in rows for name in row["scores"]))
    names = [*further, "read", "stored"]

    def value(row: Row, name: str) -> str:
        if name in further:
            return number(row["scores"].get(name), 2)
        return percent(row["read" if name == "read" else "stored_ratio"])

    columns = [f"{name.replace('_', ' ')} at {size}" for name in names for size in sizes]
    lines = [
        [
            method,
            *(_cell(row, value, name) for name in names for row in line),
            _cell(line[-1], lambda row: number(row["tokens_per_second"], 1)),
        ]
        for method, line in _lines(rows, sizes)
    ]
    return Table("", ["method", *columns, "tokens/s"], lines, spare=columns[-len(sizes) :])


def _sizes(rows: Iterable[Row]) -> list[str]:
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    return [size for size in sizes if size not in ANY_SIZE] or sizes[-1:]


def _lines(rows: list[Row], sizes: list[str]) -> list[tuple[str, list[Row | None]]]:
    # a method's row for each size; a row for all sizes stands at each size
    lines = []
    for (method,), group in _groups(rows, ("method",)):
        by_size = {row["size"]: row for row in group}
        always = next((row for row in group if row["size"] in ANY_SIZE), None)
        lines.append((method, [by_size.get(size, always) for size in sizes]))
    return lines


def _cell(row: Row | None, write: Callable[..., str], *arguments: Any) -> str:
    return "-" if row is None or row["score"] is None else write(row, *arguments)


def _difference(row: Row) -> str:
    if row["difference"] is None:
        return "-"
    return f"{row['difference']:+.2f} ({row['difference_low']:+.2f} to {row['difference_high']:+.2f})"


def _failure(row: Row) -> str:
    where = row.get("task", "fidelity")
    length = f", {row['length']:,} tokens" if "length" in row else ""
    count = f" ({row['failed']} times)" if row.get("failed", 0) > 1 else ""
    return f"failed{count}: {row['method']} at {row['size']}, {where}{length}: {row['error']}"


SCORE = {"score": lambda row: number(row["score"], 2), "95 %": lambda row: f"{row['low']:.2f}-{row['high']:.2f}"}
FIDELITY: Columns = {
    "method": (str, "method"),
    "size": (str, "size"),
    "KL": (partial(number, digits=4), "kl"),
    "KL p95": (partial(number, digits=4), "kl_p95"),
    "agreement": (percent, "agreement"),
    "perplexity": (partial(number, digits=2), "perplexity"),
    "full-kv's": (partial(number, digits=2), "perplexity_full"),
    "slow": (percent, "slow_rate"),
    "read": (percent, "read"),
    "stored": (percent, "stored_ratio"),
}
