"""The sections of `sfi trace show`, from its document."""

from collections.abc import Iterator, Sequence
from typing import Any

from sfi_cli.commands.trace.health_views import health_lines
from sfi_cli.commands.trace.lossless_views import depth_table, lossless_line, place_table, reason_table, tested_line
from sfi_cli.commands.trace.observation_views import (
    correction_table,
    drift_table,
    head_similarity_table,
    locality_table,
    lowest_heads_line,
    query_cosine_table,
    recall_line,
)
from sfi_cli.commands.trace.support_views import (
    audit_table,
    coverage_line,
    lag_table,
    logits_line,
    selection_table,
    stability_table,
    worst_heads_line,
)
from sfi_cli.terminal.tables import count, duration, number, pairs, percent, plural, rendered, table
from sfi_traces.report.facts import audit_words

MOST_TRIGGERS = 12
MOST_REQUESTS = 4
OF_TIMES = ("latency", "break_even")  # sections left out for a trace without times

Row = dict[str, Any]


def show_text(document: Row) -> str:
    """Return every section that the trace has data for, and what it lacks for the others."""
    sections = (
        ("health", health_lines),
        ("lossless", lossless_line),
        ("lossless", reason_table),
        ("lossless", place_table),
        ("lossless", depth_table),
        ("triggers", _trigger_table),
        ("stability", stability_table),
        ("lags", lag_table),
        ("drift", drift_table),
        ("locality", locality_table),
        ("head_similarity", head_similarity_table),
        ("query_cosine", query_cosine_table),
        ("query_cosine", lowest_heads_line),
        ("audit", audit_table),
        ("audit", worst_heads_line),
        ("logits", tested_line if document["lossless"] else logits_line),
        ("selections", selection_table),
        ("coverage", coverage_line),
        ("corrections", correction_table),
        ("recalls", recall_line),
        ("latency", _latency_table),
        ("reads", _reads_table),
        ("phases", _phase_table),
        ("break_even", _break_even_line),
        ("ranks", _rank_table),
    )
    timed = document["latency"]["kinds"]
    parts = [view(document[name]) for name, view in sections if document[name] and (timed or name not in OF_TIMES)]
    missing = [f"not recorded: {line}" for line in document["missing"]]
    return rendered([pairs(_run_lines(document)), "", *parts, *missing])


def _run_lines(document: Row) -> Iterator[tuple[str, str]]:
    run, steps = document["run"], document["steps"]
    where = "" if run["imported"] else f", {run['backend']} on {run['device']}"
    yield "model", f"{run['model']} ({run['architecture']}){where}"
    way = ", lossless" if run["lossless"] else ""
    yield "policy", f"{run['policy']}{way}, preset {run['preset'] or 'default'}"
    settings = ", ".join(f"{name} {_setting(value)}" for name, value in run["settings"].items())
    yield "settings", settings or "the defaults"
    yield "prompts", _prompts(run["requests"])
    yield "finished", _finished(run)
    yield "audit", audit_words(run)
    if steps["launched"]:
        yield "CUDA graphs", _graphs(run, steps)
    reasons = ", ".join(f"{steps:,} {reason}" for reason, steps in steps["reasons"].items())
    slow = f"{steps['slow']:,} slow ({reasons}), {steps['fast']:,} fast"
    yield ("steps", f"{steps['steps']:,}: {slow}; from step 1 on {percent(steps['slow_share'])} are slow")
    each = "token given" if run["lossless"] else "step"
    read = f"{number(steps['mean_attended_tokens'], 0)} tokens a {each}, {percent(steps['read_ratio'])}"
    yield "cache read", f"{read} of the context; fast steps {percent(steps['fast_read_ratio'])}"


def _graphs(run: Row, steps: Row) -> str:
    count_of = f"{steps['replayed']:,} of {plural(steps['launched'], 'decoding step')} replayed"
    return count_of + (f": {run['not_replayed']}" if run["not_replayed"] else "")


def _setting(value: object) -> str:
    return repr(" ".join(map(str, value))) if isinstance(value, list) else str(value)


def _prompts(requests: Sequence[Row]) -> str:
    shown = [
        f"request {one['request']}: {count(one['prompt_tokens'])} tokens, {plural(one['steps'], 'step')}"
        for one in requests[:MOST_REQUESTS]
    ]
    more = len(requests) - len(shown)
    return "; ".join(shown) + (f"; and {more:,} more" if more else "")


def _finished(run: Row) -> str:
    if run["finished"] is None:
        return "no: the run was killed, or goes on"
    return f"{run['finished']}" + (f", stopped early: {run['stopped']}" if run["stopped"] else "")


def _trigger_table(triggers: Sequence[Row]) -> Any:
    rows = [
        (_token(one), count(one["token_id"]), count(one["count"]), percent(one["slow_after"]))
        for one in triggers[:MOST_TRIGGERS]
    ]
    more = len(triggers) - len(rows)
    title = "Tokens that end a sentence" + (f", and {more:,} more" if more else "")
    return table(title, ("token", "id", "count", "slow after"), rows)


def _token(token: Row) -> str:
    if token["token_text"] is not None:
        return repr(token["token_text"])
    return "(left out)" if token["token_id"] is None else "-"


def _latency_table(found: Row) -> Any:
    rows = [
        (
            kind["kind"] + (" (audited)" if kind["audited"] else ""), count(kind["n"]),
            *(duration(kind[f"{name}_us"]) for name in ("mean", "p50", "p95", "p99")),
        )
        for kind in found["kinds"]
    ]  # fmt: skip
    speed = f"{number(found['tokens_per_second'], 1)} tokens/s"
    title = f"Time of a step; {speed}" + (", the audit's cost included" if found["audited"] else "")
    return table(title, ("step", "n", "mean", "p50", "p95", "p99"), rows)


def _reads_table(found: Sequence[Row]) -> Any:
    rows = [
        (
            kind["kind"], count(kind["n"]), number(kind["requests"], 1), number(kind["cached_tokens"], 0),
            f"{number(kind['moved_bytes'] / 1e6, 2)} MB",
        )
        for kind in found
    ]  # fmt: skip
    columns = ("step", "n", "requests", "cached tokens", "K and V read")
    return table("What a step of the batch holds and reads, in the mean", columns, rows)


def _phase_table(found: Row) -> Any:
    rows = [
        (
            part, span["name"] + ("" if span["stream"] == "main" else f" ({span['stream']})"),
            percent(span["share"]), duration(span["total_us"]), duration(span["step_us"]),
            count(span["spans"]),
        )
        for part, spans in found.items()
        for span in spans
    ]  # fmt: skip
    columns = ("", "phase", "share", "total", "per step with it", "spans")
    return table("Time by phase", columns, rows, left=2)


def _rank_table(found: Row) -> Any:
    rows = [
        (
            str(one["rank"]), count(one["steps"]), count(one["selections"]), count(one["spans"]),
            duration(one["forward_us"]), duration(one["attention_us"]),
            "yes" if one["finished"] else "no: killed, or goes on",
        )
        for one in found["each"]
    ]  # fmt: skip
    missing = ", ".join(map(str, found["missing"]))
    title = f"Ranks: {len(rows)} of {found['size']}" + (f", without {missing}" if missing else "")
    columns = ("rank", "steps", "selections", "spans", "pass (median)", "its attention", "finished")
    return table(title, columns, rows)


def _break_even_line(found: Row) -> str:
    if found["context_tokens"] is None:
        return f"break-even context length: unknown, {found['reason']}"
    return (
        f"break-even context length: {found['context_tokens']:,.0f} tokens (dense attention "
        f"{number(found['dense_us_per_token'], 4)} us per cached token, fast {duration(found['fast_us'])} a "
        f"step, refresh {number(found['select_us_per_token'] or 0.0, 4)} us per cached token and "
        f"{duration(found['pack_us'] or 0.0)}, {percent(found['slow_share'])} slow)"
    )
