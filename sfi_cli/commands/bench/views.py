"""The tables of `sfi bench`, from its document."""

from typing import Any

from sfi_cli.terminal.tables import count, noted, number, percent, ratio, table


def bench_text(document: dict[str, Any]) -> str:
    """Return the measured rows, the runs that did not fit into memory, and the notes."""
    tables = [_measured(document)]
    if any(row["kv_device_budget"] for row in document["rows"]):
        tables.append(_tiers(document))
    if any(row["lossless"] for row in document["rows"]):
        tables.append(_drafting(document))
    if document["skipped"]:
        tables.append(_skipped(document))
    return noted(tables, document["notes"])


def _measured(document: dict[str, Any]) -> Any:
    machine = document["machine"]
    columns = (
        "policy", "context", "batch", "tokens/s", "min - max", "x full-kv", "bytes", "reached",
        "x transf.", "slow", "fast ms", "mixed ms", "slow ms", "GB/s", "of copy",
    )  # fmt: skip
    rows = [
        (
            row["policy"], count(row["context"]), str(row["batch"]), _rate(row["decode_tokens_per_second"]),
            " - ".join(_rate(row[f"decode_tokens_per_second_{end}"]) for end in ("min", "max")),
            ratio(row["speedup"]), ratio(row["roofline_speedup"]), percent(row["roofline_share"], 0),
            ratio(row["speedup_over_transformers"]), percent(row["slow_rate"]),
            *(_milliseconds(row[f"{kind}_p50_ms"]) for kind in ("fast", "mixed", "slow")),
            f"{row['gb_per_s']:,.2f}", percent(row["bandwidth_share"], 0),
        )
        for row in document["rows"]
    ]  # fmt: skip
    title = (
        f"{document['model']['name']}, {document['model']['dtype']}, on "
        f"{machine.get('gpu') or machine['processor']}, {machine['threads']} threads, "
        f"copy {machine['copy_gb_per_s']:,.1f} GB/s"
    )
    return table(title, columns, rows)


def _tiers(document: dict[str, Any]) -> Any:
    columns = ("policy", "context", "batch", "device MB", "host MB", "recalled MB a step")
    rows = [
        (
            row["policy"], count(row["context"]), str(row["batch"]),
            *(
                f"{row[name] / 1e6:,.3f}"
                for name in ("kv_device_bytes", "kv_host_bytes", "recalled_bytes_per_step")
            ),
        )
        for row in document["rows"]
        if row["kv_device_budget"]
    ]  # fmt: skip
    return table(
        f"KV cache under a device budget of {document['settings']['kv_device_budget']}",
        columns,
        rows,
    )


def _drafting(document: dict[str, Any]) -> Any:
    columns = (
        "policy", "context", "batch", "acceptance", "kept of tested", "kept of drafted",
        "accepted a verification", "passes a token",
    )  # fmt: skip
    rows = [
        (
            row["policy"], count(row["context"]), str(row["batch"]), _acceptance(row),
            percent(row["kept_of_tested"]), percent(row["kept_of_drafted"]),
            number(row["accepted_per_verification"], 2), number(row["passes_per_token"], 2),
        )
        for row in document["rows"]
        if row["lossless"]
    ]  # fmt: skip
    return table("Lossless runs", columns, rows)


def _acceptance(row: dict[str, Any]) -> str:
    stated = row["stated_acceptance"]
    return "measured" if stated is None else f"stated {percent(stated)}"


def _skipped(document: dict[str, Any]) -> Any:
    columns = ("policy", "context", "batch", "needs GB", "free GB", "batch that fits")
    rows = [
        (
            row["policy"], count(row["context"]), str(row["batch"]), f"{row['needed_bytes'] / 1e9:,.2f}",
            f"{row['free_bytes'] / 1e9:,.2f}", str(row["largest_batch"] or "none"),
        )
        for row in document["skipped"]
    ]  # fmt: skip
    return table("Did not fit", columns, rows)


def forecast_text(document: dict[str, Any]) -> str:
    """Return the forecast's rows and notes."""
    machine = document["machine"]
    columns = (
        "policy", "context", "batch", "needs GB", "KV GB", "fits", "largest batch", "fast GB", "slow GB",
        "mean GB", "tokens/s at most", "x full-kv", "synchronized", "break-even",
    )  # fmt: skip
    rows = [
        (
            row["policy"], count(row["context"]), str(row["batch"]), f"{row['memory_bytes'] / 1e9:,.2f}",
            f"{row['kv_bytes'] / 1e9:,.2f}", "yes" if row["fits"] else "no",
            str(row["largest_batch"] or "none"),
            *(_gigabytes(row[f"{kind}bytes_per_step"]) for kind in ("fast_", "slow_", "")),
            _rate(row["roofline_tokens_per_second"]), ratio(row["roofline_speedup"]),
            ratio(row["synchronized_roofline_speedup"]), count(row["break_even_context"]),
        )
        for row in document["rows"]
    ]  # fmt: skip
    title = (
        f"{document['model']['name']}, {document['model']['dtype']}: bytes at "
        f"{machine['bandwidth_gb_per_s']:,.1f} GB/s, {machine['memory_bytes'] / 1e9:,.1f} GB of memory"
    )
    tables = [table(title, columns, rows)]
    if any(row.get("lossless") for row in document["rows"]):
        tables.append(_cycles(document))
    return noted(tables, document["notes"])


def _cycles(document: dict[str, Any]) -> Any:
    columns = (
        "policy", "context", "batch", "acceptance", "drafts a verification", "tokens a verification",
        "passes a token",
    )  # fmt: skip
    rows = [
        (
            row["policy"], count(row["context"]), str(row["batch"]), _acceptance(row),
            str(row["drafts"]), number(row["tokens_per_verification"], 2), number(row["passes_per_token"], 2),
        )
        for row in document["rows"]
        if row["lossless"]
    ]  # fmt: skip
    return table("Lossless runs", columns, rows)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"  # noqa: PLR2004


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _gigabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:,.3g}"
