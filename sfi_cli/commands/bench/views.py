"""The tables of `sfi bench`, from its document."""

from typing import Any

from sfi_cli.commands.kernel_bench.views import ratio, rendered, titled

NOTHING, WIDTH = "-", 184


def bench_text(document: dict[str, Any]) -> str:
    """Return the measured rows, what did not fit, and the notes."""
    tables = [_measured(document)]
    if document["skipped"]:
        tables.append(_skipped(document))
    return rendered(tables, width=WIDTH) + "".join(f"* {note}\n" for note in document["notes"])


def _measured(document: dict[str, Any]) -> Any:
    machine = document["machine"]
    table = titled(
        f"{document['model']['name']}, {document['model']['dtype']}, on "
        f"{machine.get('gpu') or machine['processor']}, {machine['threads']} threads, "
        f"copy {machine['copy_gb_per_s']:,.1f} GB/s"
    )
    table.add_column("policy", no_wrap=True)
    headings = (
        "context", "batch", "tokens/s", "min - max", "x full-kv", "bytes", "reached",
        "x transf.", "slow", "fast ms", "mixed ms", "slow ms", "GB/s", "of copy",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in document["rows"]:
        low, high = (row[f"decode_tokens_per_second_{end}"] for end in ("min", "max"))
        table.add_row(
            row["policy"], f"{row['context']:,}", str(row["batch"]),
            _rate(row["decode_tokens_per_second"]), f"{_rate(low)} - {_rate(high)}",
            ratio(row["speedup"]), ratio(row["roofline_speedup"]), _share(row["roofline_share"]),
            ratio(row["speedup_over_transformers"]), _share(row["slow_rate"], digits=1),
            *(_milliseconds(row[f"{kind}_p50_ms"]) for kind in ("fast", "mixed", "slow")),
            f"{row['gb_per_s']:,.2f}", _share(row["bandwidth_share"]),
        )  # fmt: skip
    return table


def _skipped(document: dict[str, Any]) -> Any:
    table = titled("Did not fit")
    table.add_column("policy", no_wrap=True)
    for heading in ("context", "batch", "needs GB", "free GB", "batch that fits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in document["skipped"]:
        table.add_row(
            row["policy"], f"{row['context']:,}", str(row["batch"]),
            f"{row['needed_bytes'] / 1e9:,.2f}", f"{row['free_bytes'] / 1e9:,.2f}",
            str(row["largest_batch"] or "none"),
        )  # fmt: skip
    return table


def forecast_text(document: dict[str, Any]) -> str:
    """Return the forecast's rows and notes."""
    machine = document["machine"]
    table = titled(
        f"{document['model']['name']}, {document['model']['dtype']}: bytes at "
        f"{machine['bandwidth_gb_per_s']:,.1f} GB/s, {machine['memory_bytes'] / 1e9:,.1f} GB of memory"
    )
    table.add_column("policy", no_wrap=True)
    headings = (
        "context", "batch", "needs GB", "KV GB", "fits", "largest batch", "fast GB", "slow GB", "mean GB",
        "tokens/s at most", "x full-kv", "synchronized", "break-even",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in document["rows"]:
        even = row["break_even_context"]
        table.add_row(
            row["policy"], f"{row['context']:,}", str(row["batch"]),
            f"{row['memory_bytes'] / 1e9:,.2f}", f"{row['kv_bytes'] / 1e9:,.2f}",
            "yes" if row["fits"] else "no", str(row["largest_batch"] or "none"),
            *(_gigabytes(row[f"{kind}_bytes_per_step"]) for kind in ("fast", "slow")),
            _gigabytes(row["bytes_per_step"]), _rate(row["roofline_tokens_per_second"]),
            ratio(row["roofline_speedup"]), ratio(row["synchronized_roofline_speedup"]),
            NOTHING if even is None else f"{even:,}",
        )  # fmt: skip
    return rendered([table], width=WIDTH) + "".join(f"* {note}\n" for note in document["notes"])


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"  # noqa: PLR2004


def _share(value: float | None, *, digits: int = 0) -> str:
    return NOTHING if value is None else f"{value:.{digits}%}"


def _milliseconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.4g}"


def _gigabytes(value: float | None) -> str:
    return NOTHING if value is None else f"{value / 1e9:,.3g}"
