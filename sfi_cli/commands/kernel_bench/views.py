"""The kernel benchmark's tables, from its document."""

from typing import Any

from sfi_cli.terminal.tables import Part, noted
from sfi_traces.views.table import Columns, Row, Table, number, percent, ratio, written


def group_text(document: dict[str, Any], *, title: str) -> list[Part]:
    """Return the rows of a group, in the columns that say something of them."""
    rows = document["rows"]
    columns = {
        name: cell for name, cell in MEASURED.items() if any(written(cell, row) not in ("", "-") for row in rows)
    }
    spare = [name for name in ("x paper-like", "p90", "p10", "TFLOP/s", "of copy") if name in columns]
    return [Table.of(title, columns, rows, spare=spare)]


def closing_text(document: dict[str, Any], *, sweep: bool) -> list[Part]:
    """Return the machine, for a sweep the paper's Table 1 beside ours, and the notes."""
    machine = document["machine"]
    where, copy = machine.get("gpu") or machine["processor"], machine["copy_gb_per_s"]
    tables: list[Part] = [f"{document['backend']} backend on {where}, copy {copy:,.1f} GB/s"]
    if sweep:
        fast = [row for row in document["rows"] if row["op"] == "fast" and row["failure"] is None]
        title = "Speed-up of the fast step, beside the paper's Table 1"
        tables.append(Table.of(title, SWEPT, fast, left=0, spare=("bytes", "ours, x paper-like")))
    return noted(tables, [*document["notes"], *(f"failed: {failure}" for failure in document["failures"])])


def compiled_text(compiled: list[dict[str, Any]]) -> list[Part]:
    """Return registers, spills and shared memory of every compiled kernel."""
    return [Table.of("Compiled kernels", COMPILED, compiled, left=2, spare=("async buffers",))]


def _read(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3g}"


def _paper(retention: float) -> str:
    from sfi_core.measure.kernel_bench.settings import TABLE_1

    return ratio(TABLE_1.get(retention))


def _time(name: str, otherwise: str = "") -> Any:
    def write(row: Row) -> str:
        if row["median_us"] is None:
            return otherwise
        microseconds = row[name]
        if microseconds < 10_000:  # noqa: PLR2004
            return f"{microseconds:,.1f} us"
        return f"{microseconds / 1e3:,.1f} ms"

    return write


def _over(name: str) -> Any:
    beside = ("fast", "dense", "verify", "prompt")  # ops that have such a rival
    return lambda row: ratio(row[f"speedup_over_{name}"] if row["op"].startswith(beside) else None)


MEASURED: Columns = {
    "op": lambda row: f"{row['op']} ({row['form']})" if row["form"] else str(row["op"]),
    "read %": (_read, "retention"),
    "launches": lambda row: str(row.get("launches") or ""),
    "median": _time("median_us", "FAILED"),
    "p10": _time("p10_us"),
    "p90": _time("p90_us"),
    "GB/s": lambda row: "" if row["median_us"] is None else number(row["gb_per_s"], 1),
    "of copy": lambda row: "" if row["median_us"] is None else percent(row["bandwidth_share"], 0),
    "TFLOP/s": lambda row: "" if row["tflop_per_s"] is None else f"{row['tflop_per_s']:,.3g}",
    "x dense": _over("dense"),
    "x SDPA": _over("sdpa"),
    "x paper-like": _over("paper_like"),
}
SWEPT: Columns = {
    "read %": (_read, "retention"),
    "paper": (_paper, "retention"),
    "bytes": (ratio, "ideal_speedup"),
    "ours, x dense": (ratio, "speedup_over_dense"),
    "ours, x SDPA": (ratio, "speedup_over_sdpa"),
    "ours, x paper-like": (ratio, "speedup_over_paper_like"),
}
COMPILED: Columns = {
    "kernel": (str, "kernel"),
    "arch": (str, "arch"),
    "registers": (str, "registers"),
    "spills B": (str, "spill_bytes"),
    "shared B": ("{:,}".format, "shared_bytes"),
    "async buffers": (str, "async_buffers"),
    "": lambda row: "OVER THE LIMIT" if row["over_limit"] else "SPILLS" if row["spill_bytes"] else "ok",
}
