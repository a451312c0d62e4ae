"""What `sfi trace show` prints, from its document: a screen, or with --full every table."""

from collections.abc import Iterator
from functools import partial

from sfi_cli.commands.trace.health_views import finding_lines, health_lines
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
)
from sfi_cli.terminal.tables import Part
from sfi_traces.views.facts import disagreement, facts, latency_table, run_table, trigger_table
from sfi_traces.views.table import Columns, Row, Table, count, dense_words, duration, number, percent, plural

MOST_REQUESTS, MOST_STEPS, LONGEST = 3, 3, 150  # requests, disagreements, characters of an answer
OF_TIMES = ("latency", "break_even")  # sections left out for a trace without times


def show_text(document: Row) -> list[Part]:
    """Return a screen: what ran, its answer, where full attention differs, health and speed."""
    run = document["run"]
    wanted = ("model", "policy", "settings", *["finished"] * (not run["finished"] or bool(run["stopped"])))
    rows = [row for row in run_table(run).rows if row[0] in wanted]
    rows += [*_answers(document), *_launched(document)]
    for one in facts(document):
        rows.append((one.name, f"{one.value}, {one.note}"))
        if one.name == "full attention's token":
            rows += [("", line) for line in _disagreements(document["disagreements"])]
        if one.name == "health":
            rows += [("", line) for line in finding_lines(document["health"], "problem")]
    more = f"sfi trace show {document['trace']} --full has every table, --step N what a step read"
    return [Table("", (), [*rows, ("more", f"{more}; sfi trace report draws it")])]


def full_text(document: Row) -> list[Part]:
    """Return every section that the trace has data for, and what it lacks for the others."""
    sections = (
        ("health", health_lines),
        ("lossless", lossless_line),
        ("lossless", reason_table),
        ("lossless", place_table),
        ("lossless", depth_table),
        ("triggers", trigger_table),
        ("stability", stability_table),
        ("lags", lag_table),
        ("drift", drift_table),
        ("locality", locality_table),
        ("head_similarity", head_similarity_table),
        ("query_cosine", query_cosine_table),
        ("query_cosine", lowest_heads_line),
        ("audit", audit_table),
        ("logits", tested_line if document["lossless"] else logits_line),
        ("disagreements", _disagreement_table),
        ("selections", selection_table),
        ("coverage", coverage_line),
        ("corrections", correction_table),
        ("recalls", recall_line),
        ("latency", latency_table),
        ("reads", partial(Table.of, READS_TITLE, READS)),
        ("phases", _phase_table),
        ("break_even", _break_even_line),
        ("ranks", _rank_table),
    )
    timed = document["latency"]["kinds"]
    parts = [view(document[name]) for name, view in sections if document[name] and (timed or name not in OF_TIMES)]
    head = [*run_table(document["run"]).rows, *_answers(document), *_launched(document)]
    head += [(one.name, f"{one.value}, {one.note}") for one in facts(document) if one.name != "health"]
    return [Table("", (), head), "", *parts, *_missing(document["missing"])]


def _answers(document: Row) -> Iterator[tuple[str, str]]:
    steps = {one["request"]: one for one in document["run"]["requests"]}
    for one in document["answers"][:MOST_REQUESTS]:
        own = steps[one["request"]]
        text = "left out" if one["text"] is None else repr(one["text"])
        if len(text) > LONGEST:
            text = f"{text[: LONGEST - 30]} ... {text[-30:]}"
        yield (
            f"request {one['request']}",
            f"{count(own['prompt_tokens'])} tokens of prompt, {plural(own['steps'], 'step')}: {text}",
        )
    if (more := len(document["answers"]) - MOST_REQUESTS) > 0:
        yield "", f"and {plural(more, 'more request')}"


def _disagreements(found: list[Row]) -> Iterator[str]:
    several = len({one["request"] for one in found}) > 1
    for one in found[:MOST_STEPS]:
        request = f"request {one['request']}, " * several
        yield f"{request}step {one['step']}: {disagreement(one)}, KL {number(one['kl_next_token'])}"
    if (more := len(found) - MOST_STEPS) > 0:
        yield f"and {plural(more, 'more step')}"


def _disagreement_table(found: list[Row]) -> Table:
    return Table.of("Steps where full attention would have said another token", DISAGREEMENT, found, left=3)


def _missing(lines: list[str]) -> list[str]:
    # all that an audit records in one line
    audited = [line for line in lines if "--audit" in line]
    if len(audited) > 1:
        names = "; ".join(line.partition(" (")[0] for line in audited)
        lines = [f"{names} (record with --audit 1)", *(line for line in lines if line not in audited)]
    return [f"not recorded: {line}" for line in lines]


def _launched(document: Row) -> Iterator[tuple[str, str]]:
    run, steps = document["run"], document["steps"]
    if steps["launched"]:
        replayed = f"{steps['replayed']:,} of {plural(steps['launched'], 'decoding step')} replayed"
        yield "CUDA graphs", replayed + (f": {run['not_replayed']}" if run["not_replayed"] else "")


def _phase_table(found: Row) -> Table:
    rows = [{"part": part, **span} for part, spans in found.items() for span in spans]
    return Table.of("Time by phase", PHASES, rows, left=2, spare=("spans",))


def _rank_table(found: Row) -> Table:
    missing = ", ".join(map(str, found["missing"]))
    title = f"Ranks: {len(found['each'])} of {found['size']}" + (f", without {missing}" if missing else "")
    return Table.of(title, RANKS, found["each"])


def _break_even_line(found: Row) -> str:
    if found["context_tokens"] is None:
        return f"break-even context length: unknown, {found['reason']}"
    return (
        f"break-even context length: {found['context_tokens']:,.0f} tokens (dense attention "
        f"{number(found['dense_us_per_token'], 4)} us per cached token, fast {duration(found['fast_us'])} a "
        f"step, refresh {number(found['select_us_per_token'] or 0.0, 4)} us per cached token and "
        f"{duration(found['pack_us'] or 0.0)}, {percent(found['slow_share'])} slow)"
    )


DISAGREEMENT: Columns = {
    "step": lambda one: f"{one['step']}" + (f" of request {one['request']}" if one["request"] else ""),
    "gave": lambda one: "(left out)" if one["token_text"] is None else repr(one["token_text"]),
    "full attention": dense_words,
    "KL": (number, "kl_next_token"),
}
READS_TITLE = "What a step of the batch holds and reads, in the mean"
READS: Columns = {
    "step": (str, "kind"),
    "n": (count, "n"),
    "requests": (partial(number, digits=1), "requests"),
    "cached tokens": (partial(number, digits=0), "cached_tokens"),
    "K and V read": lambda one: f"{number(one['moved_bytes'] / 1e6, 2)} MB",
}
PHASES: Columns = {
    "": (str, "part"),
    "phase": lambda span: span["name"] + ("" if span["stream"] == "main" else f" ({span['stream']})"),
    "share": (percent, "share"),
    "total": (duration, "total_us"),
    "per step with it": (duration, "step_us"),
    "spans": (count, "spans"),
}
RANKS: Columns = {
    "rank": (str, "rank"),
    "steps": (count, "steps"),
    "selections": (count, "selections"),
    "spans": (count, "spans"),
    "pass (median)": (duration, "forward_us"),
    "its attention": (duration, "attention_us"),
    "finished": lambda one: "yes" if one["finished"] else "no: killed, or goes on",
}
