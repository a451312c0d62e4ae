"""The kernel benchmark's tables, from its document."""

import io
import shutil
from typing import Any

LEAST_WIDTH = 130


def bench_text(document: dict[str, Any], *, sweep: bool) -> str:
    """Return every row, Table 1's row beside ours for a sweep, and the notes."""
    tables = [_rows_table(document)]
    if sweep:
        tables.append(_sweep_table(document))
    return rendered(tables) + "".join(f"* {note}\n" for note in document["notes"])


def compiled_text(compiled: list[dict[str, Any]]) -> str:
    """Return what the compiler made of every kernel."""
    table = titled("Compiled kernels")
    for heading in ("kernel", "arch"):
        table.add_column(heading)
    for heading in ("registers", "spills B", "shared B", "async buffers", ""):
        table.add_column(heading, justify="right")
    for row in compiled:
        table.add_row(
            row["kernel"], row["arch"], str(row["registers"]), str(row["spill_bytes"]),
            f"{row['shared_bytes']:,}", str(row["async_buffers"]), _verdict(row),
        )  # fmt: skip
    return rendered([table])


def _verdict(row: dict[str, Any]) -> str:
    if row["over_limit"]:
        return "OVER THE LIMIT"
    return "SPILLS" if row["spill_bytes"] else "ok"


def _rows_table(document: dict[str, Any]) -> Any:
    machine = document["machine"]
    table = titled(
        f"{document['backend']} backend on {machine.get('gpu') or machine['processor']}, "
        f"copy {machine['copy_gb_per_s']:,.1f} GB/s"
    )
    table.add_column("op", no_wrap=True)
    table.add_column("read %", justify="right")
    columns = ("median", "p10", "p90", "GB/s", "of copy", "x dense", "x SDPA", "x paper-like")
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in document["rows"]:
        form = f" ({row['form']})" if row["form"] else ""
        table.add_row(
            row["op"] + form,
            "" if row["retention"] is None else f"{100 * row['retention']:.3g}",
            _time(row["median_us"]),
            _time(row["p10_us"]),
            _time(row["p90_us"]),
            f"{row['gb_per_s']:,.1f}",
            f"{row['bandwidth_share']:.0%}",
            *(
                ratio(row[f"speedup_over_{name}"] if _is_attention(row) else None)
                for name in ("dense", "sdpa", "paper_like")
            ),
        )
    return table


def _sweep_table(document: dict[str, Any]) -> Any:
    from sfi_core.measure.kernel_bench.settings import TABLE_1

    table = titled("Speed-up of the fast step, beside the paper's Table 1")
    columns = ("read %", "paper", "bytes", "ours, x dense", "ours, x SDPA", "ours, x paper-like")
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in document["rows"]:
        if row["op"] == "fast":
            table.add_row(
                f"{100 * row['retention']:.3g}",
                ratio(TABLE_1.get(row["retention"])),
                ratio(row["ideal_speedup"]),
                ratio(row["speedup_over_dense"]),
                ratio(row["speedup_over_sdpa"]),
                ratio(row["speedup_over_paper_like"]),
            )
    return table


def _is_attention(row: dict[str, Any]) -> bool:
    return bool(row["op"].startswith(("fast", "dense")))


def ratio(value: float | None) -> str:
    """Return a factor, or a dash."""
    return "-" if value is None else f"{value:.2f}x"


def _time(microseconds: float) -> str:
    if microseconds < 10_000:  # noqa: PLR2004
        return f"{microseconds:,.1f} us"
    return f"{microseconds / 1e3:,.1f} ms"


def titled(title: str) -> Any:
    """Return an empty table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)


def rendered(tables: list[Any], *, width: int = LEAST_WIDTH) -> str:
    """Return tables as text, at least `width` columns wide."""
    from rich.console import Console

    width = max(width, shutil.get_terminal_size().columns)
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        markup=False,
        emoji=False,
        highlight=False,
    )  # a kernel's name may look like markup
    for table in tables:
        console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "".join(f"{line.rstrip()}\n" for line in lines)
