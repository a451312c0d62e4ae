"""What `sfi trace show` prints of a trace, from its document: a screen, or every table."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from sfi_cli.commands.trace.check import finding_lines, health_lines
from sfi_cli.terminal.tables import Part, shortened
from sfi_traces.views.facts import disagreement, facts, latency_table, run_table, trigger_table
from sfi_traces.views.table import (
    SPREAD,
    Columns,
    Row,
    Table,
    count,
    dense_words,
    duration,
    number,
    percent,
    plural,
    quoted,
    span,
    spread,
)

MOST_REQUESTS, MOST_STEPS, LONGEST = 3, 3, 150  # requests, disagreements, characters of an answer
PLACES = "Acceptance by place in the sentence; 0 is its first token"
DEPTHS = "Acceptance by depth in the draft; 1 is its first token"


def show_text(document: Row) -> list[Part]:
    """Return a screen: what ran, its answer, where full attention differs, health and speed."""
    run = document["run"]
    left_out = {"audit", "begun", *["finished"] * bool(run["finished"] and not run["stopped"])}
    rows = [row for row in run_rows(document) if row[0] not in left_out]
    for row in facts(document):
        rows.append((row.name, f"{row.value}, {row.note}"))
        if row.name == "full attention's token":
            rows += [("", line) for line in _disagreements(document["disagreements"])]
        if row.name == "health":
            rows += [("", line) for line in finding_lines(document["health"])]
    more = f"sfi trace show {document['trace']} --full has every table, --step N what a step read"
    return [Table("", (), [*rows, ("more", f"{more}; sfi trace report draws it")])]


def run_rows(document: Row) -> Iterator[tuple[str, str]]:
    """Yield what ran, its answers, and how many steps were replayed as CUDA graphs."""
    run, graphs = document["run"], document["steps"]
    yield from ((name, value) for name, value in run_table(run).rows)
    steps = {row["request"]: row for row in run["requests"]}
    for row in document["answers"][:MOST_REQUESTS]:
        about = steps[row["request"]]
        text = "left out" if row["text"] is None else shortened(repr(row["text"]), LONGEST)
        prompt = f"{count(about['prompt_tokens'])} tokens of prompt, {plural(about['steps'], 'step')}"
        yield f"{run['unit']} {row['request']}", f"{prompt}: {text}"
    if (more := len(document["answers"]) - MOST_REQUESTS) > 0:
        yield "", "and " + plural(more, f"more {run['unit']}")
    if graphs["replayed"] or run["not_replayed"]:
        replayed = f"{graphs['replayed']:,} of {plural(graphs['launched'], 'decoding step')} replayed"
        yield "CUDA graphs", replayed + (f": {run['not_replayed']}" if run["not_replayed"] else "")


def _disagreements(disagreeing: list[Row]) -> Iterator[str]:
    several = len({row["request"] for row in disagreeing}) > 1
    for row in disagreeing[:MOST_STEPS]:
        request = f"request {row['request']}, " * several
        yield f"{request}step {row['step']}: {disagreement(row)}, KL {number(row['kl_next_token'])}"
    if (more := len(disagreeing) - MOST_STEPS) > 0:
        yield f"and {plural(more, 'more step')}"


def full_text(document: Row) -> list[Part]:
    """Return every section that the trace has data for, and what it lacks for the others."""
    sections: tuple[tuple[str, Callable[[Any], Part]], ...] = (
        ("health", health_lines),
        ("lossless", lambda section: Table.of("Verifications by why the draft ended", REASONS, section["reasons"])),
        ("lossless", lambda section: Table.of(PLACES, {"place": _bin("place")} | TESTED, section["places"])),
        ("lossless", lambda section: Table.of(DEPTHS, {"depth": _bin("depth")} | TESTED, section["depths"])),
        ("triggers", trigger_table),
        ("stability", _stability),
        ("drift", _drift),
        ("head_similarity", _head_similarity),
        ("query_cosine", _query_cosine),
        ("audit", lambda section: Table.of(AUDIT_TITLE, AUDIT, _layers(section), spare=AUDIT_SPARE)),
        ("disagreements", partial(Table.of, DISAGREEMENT_TITLE, DISAGREEMENT, left=3)),
        ("selections", _selections),
        ("corrections", _corrections),
        ("recalls", _recalls),
        ("latency", latency_table),
        ("phases", _phases),
    )
    timed = document["latency"]["kinds"]
    parts = [view(document[name]) for name, view in sections if document[name] and (timed or name != "latency")]
    head = [*run_rows(document)]
    head += [(row.name, f"{row.value}, {row.note}") for row in facts(document) if row.name != "health"]
    return [Table("", (), head), "", *parts, *_missing(document["missing"])]


def _missing(lines: list[str]) -> list[str]:
    # all that an audit records in one line
    audited = [line for line in lines if "--audit" in line]
    if len(audited) > 1:
        names = "; ".join(line.partition(" (")[0] for line in audited)
        lines = [f"{names} (record with --audit 1)", *(line for line in lines if line not in audited)]
    return [f"not recorded: {line}" for line in lines]


def _layers(section: Row) -> list[Row]:
    # the values of all layers, and of each
    return [{"layer": "all", **section}, *section["layers"]]


def _bin(name: str) -> Any:
    # a column of bins of integers
    return lambda row: span(row[f"from_{name}"], row[f"to_{name}"])


def _of(name: str, part: str, write: Callable[[Any], str] = number) -> Callable[[Row], str]:
    # a column of a distribution's numbers
    return lambda row: write(row[name][part])


def _stability(section: Row) -> Table:
    rows = [
        (str(row["layer"]), kind, *spread(row[name]))
        for row in _layers(section)
        for kind, name in (("within a sentence", "within"), ("across a boundary", "across"))
    ]
    title = f"Overlap coefficient of consecutive supports (of two random ones {number(section['chance'])})"
    return Table(title, ("layer", "steps", *SPREAD), rows, left=2)


def _drift(section: Row) -> Table:
    taken, audited = section["layers_taken"], section["layers_audited"]
    title = "Attention drift: overlap with the support of step 0"
    if taken < audited:
        title += f" ({taken:,} of {audited:,} audited layers, evenly chosen)"
    return Table.of(title, DRIFT, section["bins"])


def _head_similarity(section: Row) -> str:
    before = [value for value in section["previous_layer"] if value is not None]
    return (
        f"similarity of heads at the same step: {number(section['within'])} within a layer, "
        f"{number(section['between'])} between layers ({section['steps']:,} steps), "
        f"{number(sum(before) / len(before) if before else None)} with the layer before\n"
    )


def _query_cosine(section: Row) -> Table:
    rows = [
        (str(row["layer"]), number(row["mean"]), number(row["min"]), *map(percent, row["below"]), count(row["n"]))
        for row in _layers(section)
    ]
    title = "Query cosine with the step before; FreeKV corrects where it is under tau"
    return Table(title, ("layer", "mean", "min", *(f"under {tau:g}" for tau in section["thresholds"]), "n"), rows)


def _selections(section: Row) -> Table:
    names = {
        "overlap_previous": "overlap with the one before",
        "jaccard_previous": "Jaccard index with it",
        "lambda_star": "lambda*",
        "unread_estimate": "estimated attention not read",
        "score_margin": "last score chosen over first left",
    }
    rows = [
        (title, *spread(section[name], 4 if name == "lambda_star" else 3))
        for name, title in names.items()
        if section[name]["n"]
    ]
    clipped = section["clipped_share"]
    title = "Selections" + ("" if clipped is None else f"; lambda* is clipped in {percent(clipped)} of them")
    return Table(title, ("", *SPREAD), rows)


def _corrections(section: Row) -> Table:
    places = [("all", section), *((f"layer {row['layer']}", row) for row in section["layers"])]
    places += [(f"{_bin('step')(row)} after a slow step", row) for row in section["since_slow"]]
    rows = [(place, percent(row["share"]), count(row["corrected"]), count(row["n"])) for place, row in places]
    cosine = number(section["query_cosine"])
    title = f"Corrections of fast steps x layers x KV heads; their query cosine is {cosine} on average"
    return Table(title, ("", "corrected", "corrections", "n"), rows)


def _recalls(section: Row) -> str:
    return (
        f"recalled from the host: {number(section['step_bytes'], 0)} bytes a step ({count(section['rows'])} rows "
        f"in {count(section['steps'])} steps), waited {duration(section['step_waited_us'])} a step\n"
    )


def _phases(section: Row) -> Table:
    rows = [{"part": part, **row} for part, spans in section.items() for row in spans]
    return Table.of("Time by phase", PHASES, rows, left=2, spare=("spans",))


REASONS: Columns = {
    "reason": (str, "reason"),
    "verifications": (count, "verifications"),
    "drafted": (count, "drafted"),
    "kept": (count, "accepted"),
    "share": (percent, "acceptance"),
}
TESTED: Columns = {"kept": (count, "accepted"), "of tested": (count, "tested"), "share": (percent, "acceptance")}
DRIFT: Columns = {"step": _bin("step"), "mean": (number, "mean"), "n": (count, "n")}
AUDIT_TITLE = "Audited steps: mass that fast ones retained and their error, query cosine of all"
AUDIT: Columns = {
    "layer": (str, "layer"),
    "retained": _of("retained_mass", "mean"),
    "p5": _of("retained_mass", "p5"),
    "min": _of("retained_mass", "min"),
    "n": _of("retained_mass", "n", count),
    "least head": _of("retained_mass_min", "mean"),
    "top-1 read": _of("top_1_read", "mean"),
    "output error": _of("output_error", "mean"),
    "error's p95": _of("output_error", "p95"),
    "query cosine": _of("query_cosine", "mean"),
    "cosine's p5": _of("query_cosine", "p5"),
}
AUDIT_SPARE = ("cosine's p5", "error's p95", "p5")
DISAGREEMENT_TITLE = "Steps where full attention would have said another token"
DISAGREEMENT: Columns = {
    "step": lambda row: f"{row['step']}" + (f" of request {row['request']}" if row["request"] else ""),
    "gave": lambda row: "(left out)" if row["token_text"] is None else quoted(row["token_text"]),
    "full attention": dense_words,
    "KL": (number, "kl_next_token"),
}
PHASES: Columns = {
    "": (str, "part"),
    "phase": lambda row: row["name"] + ("" if row["stream"] == "main" else f" ({row['stream']})"),
    "share": (percent, "share"),
    "total": (duration, "total_us"),
    "per step with it": (duration, "step_us"),
    "spans": (count, "spans"),
}
