"""The tables of `sfi bench`, from its document."""

from functools import partial
from typing import Any

from sfi_cli.terminal.tables import Part, noted
from sfi_traces.views.table import Columns, Row, Table, count, number, percent, ratio


def bench_text(document: dict[str, Any]) -> list[Part]:
    """Return the measured rows, the runs that did not fit into memory, and the notes."""
    machine, rows = document["machine"], document["rows"]
    title = (
        f"{_about(document)}, on {machine.get('gpu') or machine['processor']}, "
        f"{machine['threads']} threads, copy {machine['copy_gb_per_s']:,.1f} GB/s"
    )
    tables = [Table.of(title, POINT | MEASURED, rows, spare=SPARE)]
    if tiers := [row for row in rows if row["kv_device_budget"]]:
        budget = document["settings"]["kv_device_budget"]
        tables.append(Table.of(f"KV cache under a device budget of {budget}", POINT | TIERS, tiers))
    if lossless := [row for row in rows if row["lossless"]]:
        tables.append(Table.of("Lossless runs", POINT | DRAFTING, lossless))
    if document["skipped"]:
        tables.append(Table.of("Did not fit", POINT | SKIPPED, document["skipped"]))
    return [*noted(tables, document["notes"]), *_paying(document["pays_from"])]


def _paying(rows: list[dict[str, Any]]) -> list[str]:
    # a line for each batch: from which context on our policies are faster than full-kv
    batches = dict.fromkeys(row["batch"] for row in rows)
    lines = []
    for batch in batches:
        texts = [
            f"{row['policy']} does not pay up to {row['longest_context']:,} tokens here"
            if row["context"] is None
            else f"{row['policy']} pays from {row['context']:,} tokens on here"
            for row in rows
            if row["batch"] == batch
        ]
        lines.append((f"batch {batch}: " if len(batches) > 1 else "") + "; ".join(texts))
    return lines


def forecast_text(document: dict[str, Any]) -> list[Part]:
    """Return the forecast's rows and notes."""
    machine, rows = document["machine"], document["rows"]
    title = (
        f"{_about(document)}: bytes at {machine['bandwidth_gb_per_s']:,.1f} GB/s, "
        f"{machine['memory_bytes'] / 1e9:,.1f} GB of memory"
    )
    return noted([Table.of(title, POINT | FORECAST, rows, spare=SPARE_OF_FORECAST)], document["notes"])


def _about(document: dict[str, Any]) -> str:
    return f"{document['model']['name']}, {document['model']['dtype']}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"  # noqa: PLR2004


def _scaled(value: float | None, size: float, form: str) -> str:
    return "-" if value is None else format(value / size, form)


def _range(row: Row) -> str:
    ends = (row[f"decode_tokens_per_second_{end}"] for end in ("min", "max"))
    return " - ".join(map(_rate, ends))


_ms = partial(_scaled, size=1, form=",.4g")
_mb = partial(_scaled, size=1e6, form=",.3f")
_gb = partial(_scaled, size=1e9, form=",.2f")
_short_gb = partial(_scaled, size=1e9, form=",.3g")
_share, _two = partial(percent, digits=0), partial(number, digits=2)
POINT: Columns = {"policy": (str, "policy"), "context": (count, "context"), "batch": (str, "batch")}
MEASURED: Columns = {
    "tokens/s": (_rate, "decode_tokens_per_second"),
    "min - max": _range,
    "x full-kv": (ratio, "speedup"),
    "bytes": (ratio, "roofline_speedup"),
    "reached": (_share, "roofline_share"),
    "x transf.": (ratio, "speedup_over_transformers"),
    "slow": (percent, "slow_rate"),
    "fast ms": (_ms, "fast_p50_ms"),
    "mixed ms": (_ms, "mixed_p50_ms"),
    "slow ms": (_ms, "slow_p50_ms"),
    "GB/s": (_two, "gb_per_s"),
    "of copy": (_share, "bandwidth_share"),
}
SPARE = ("of copy", "GB/s", "mixed ms", "reached", "bytes", "min - max", "slow")
TIERS: Columns = {
    "device MB": (_mb, "kv_device_bytes"),
    "host MB": (_mb, "kv_host_bytes"),
    "recalled MB a step": (_mb, "recalled_bytes_per_step"),
}
DRAFTING: Columns = {
    "stated acceptance": (percent, "stated_acceptance"),
    "accepted a verification": (_two, "accepted_per_verification"),
    "passes a token": (_two, "passes_per_token"),
}
SKIPPED: Columns = {
    "needs GB": (_gb, "needed_bytes"),
    "free GB": (_gb, "free_bytes"),
    "batch that fits": lambda row: str(row["largest_batch"] or "none"),
}
FORECAST: Columns = {
    "needs GB": (_gb, "memory_bytes"),
    "KV GB": (_gb, "kv_bytes"),
    "fits": lambda row: "yes" if row["fits"] else "no",
    "largest batch": lambda row: str(row["largest_batch"] or "none"),
    "fast GB": (_short_gb, "fast_bytes_per_step"),
    "slow GB": (_short_gb, "slow_bytes_per_step"),
    "mean GB": (_short_gb, "bytes_per_step"),
    "tokens/s at most": (_rate, "roofline_tokens_per_second"),
    "x full-kv": (ratio, "roofline_speedup"),
    "break-even": (count, "break_even_context"),
}
SPARE_OF_FORECAST = ("slow GB", "fast GB", "KV GB", "break-even", "mean GB")
