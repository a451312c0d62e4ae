"""The kernel benchmark's tables, from its document."""

from typing import Any

from sfi_cli.terminal.tables import noted, percent, ratio, table

RIVALS = ("dense", "sdpa", "paper_like")


def bench_text(document: dict[str, Any], *, sweep: bool) -> str:
    """Return every row, for a sweep the paper's Table 1 beside ours, and the notes."""
    tables = [_rows_table(document)]
    if sweep:
        tables.append(_sweep_table(document))
    return noted(tables, [*document["notes"], *(f"failed: {one}" for one in document["failures"])])


def compiled_text(compiled: list[dict[str, Any]]) -> str:
    """Return registers, spills and shared memory of every compiled kernel."""
    rows = [
        (
            row["kernel"], row["arch"], str(row["registers"]), str(row["spill_bytes"]),
            f"{row['shared_bytes']:,}", str(row["async_buffers"]), _verdict(row),
        )
        for row in compiled
    ]  # fmt: skip
    columns = ("kernel", "arch", "registers", "spills B", "shared B", "async buffers", "")
    return noted([table("Compiled kernels", columns, rows, left=2)])


def _verdict(row: dict[str, Any]) -> str:
    if row["over_limit"]:
        return "OVER THE LIMIT"
    return "SPILLS" if row["spill_bytes"] else "ok"


def _rows_table(document: dict[str, Any]) -> Any:
    machine = document["machine"]
    columns = (
        "op", "read %", "launches", "median", "p10", "p90", "GB/s", "of copy", "TFLOP/s", "x dense", "x SDPA",
        "x paper-like",
    )  # fmt: skip
    rows = [
        (
            row["op"] + (f" ({row['form']})" if row["form"] else ""),
            "" if row["retention"] is None else f"{100 * row['retention']:.3g}",
            str(row.get("launches") or ""),
            *_measured(row),
            *(ratio(row[f"speedup_over_{n}"] if _beside_dense(row) else None) for n in RIVALS),
        )
        for row in document["rows"]
    ]
    title = (
        f"{document['backend']} backend on {machine.get('gpu') or machine['processor']}, "
        f"copy {machine['copy_gb_per_s']:,.1f} GB/s"
    )
    return table(title, columns, rows)


def _sweep_table(document: dict[str, Any]) -> Any:
    from sfi_core.measure.kernel_bench.settings import TABLE_1

    columns = ("read %", "paper", "bytes", "ours, x dense", "ours, x SDPA", "ours, x paper-like")
    rows = [
        (
            f"{100 * row['retention']:.3g}",
            ratio(TABLE_1.get(row["retention"])),
            ratio(row["ideal_speedup"]),
            *(ratio(row[f"speedup_over_{name}"]) for name in RIVALS),
        )
        for row in document["rows"]
        if row["op"] == "fast" and row["failure"] is None
    ]
    title = "Speed-up of the fast step, beside the paper's Table 1"
    return table(title, columns, rows, left=0)


def _measured(row: dict[str, Any]) -> tuple[str, ...]:
    if row["median_us"] is None:
        return "FAILED", "", "", "", "", ""
    times = (_time(row[f"{name}_us"]) for name in ("median", "p10", "p90"))
    tflops = "" if row["tflop_per_s"] is None else f"{row['tflop_per_s']:,.3g}"
    return *times, f"{row['gb_per_s']:,.1f}", percent(row["bandwidth_share"], 0), tflops


def _beside_dense(row: dict[str, Any]) -> bool:
    return bool(row["op"].startswith(("fast", "dense", "verify", "prompt")))


def _time(microseconds: float) -> str:
    if microseconds < 10_000:  # noqa: PLR2004
        return f"{microseconds:,.1f} us"
    return f"{microseconds / 1e3:,.1f} ms"
