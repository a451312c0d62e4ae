"""The tables of `sfi trace show --full`, from its document."""

from collections.abc import Callable
from functools import partial
from typing import Any

from sfi_cli.commands.trace.check import health_lines
from sfi_cli.commands.trace.show_views import run_rows
from sfi_cli.terminal.tables import Part
from sfi_traces.views.facts import facts, latency_table, trigger_table
from sfi_traces.views.table import (
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
)

MOST_LAYERS = 12  # of a matrix; --json has all
LOWEST_HEADS = 5
SPREAD = ("mean", "sd", "p5", "p50", "p95")
PLACES = "Acceptance by place in the sentence; 0 is its first token"
DEPTHS = "Acceptance by depth in the draft; 1 is its first token"


def full_text(document: Row) -> list[Part]:
    """Return every section that the trace has data for, and what it lacks for the others."""
    compared = "tested tokens: {}\n" if document["lossless"] else "next token: {} fast steps\n"
    sections: tuple[tuple[str, Callable[[Any], Part]], ...] = (
        ("health", health_lines),
        ("lossless", _lossless),
        ("lossless", lambda section: Table.of("Verifications by why the draft ended", REASONS, section["reasons"])),
        ("lossless", lambda section: Table.of(PLACES, {"place": _bin("place")} | TESTED, section["places"])),
        ("lossless", lambda section: Table.of(DEPTHS, {"depth": _bin("depth")} | TESTED, section["depths"])),
        ("triggers", trigger_table),
        ("stability", _stability),
        ("drift", lambda section: Table.of(f"{DRIFT_TITLE}{_taken(section)}", DRIFT, section["bins"])),
        ("head_similarity", _head_similarity),
        ("query_cosine", _query_cosine),
        ("query_cosine", _lowest_heads),
        ("audit", lambda section: Table.of(AUDIT_TITLE, AUDIT, _layers(section), spare=AUDIT_SPARE)),
        ("logits", lambda section: compared.format(_compared(section))),
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


def _spread(values: Row | None, digits: int = 3) -> list[str]:
    if values is None:
        return ["-"] * len(SPREAD) + ["0"]
    return [*(number(values[name], digits) for name in SPREAD), count(values["n"])]


def _bin(name: str) -> Any:
    # a column of bins of integers
    return lambda row: span(row[f"from_{name}"], row[f"to_{name}"])


def _of(name: str, part: str, write: Callable[[Any], str] = number) -> Callable[[Row], str]:
    # a column of a distribution's numbers
    return lambda row: write(row[name][part])


def _lossless(section: Row) -> str:
    each, passes = (number(section[name], 2) for name in ("tokens_per_verification", "passes_per_token"))
    kept = f"{count(section['accepted'])} of {count(section['drafted'])} drafted tokens"
    return (
        f"lossless: {plural(section['verifications'], 'verification')} gave {count(section['tokens'])} tokens, "
        f"{each} each, in {passes} passes a token; kept {kept} ({percent(section['acceptance'])}), "
        f"{percent(section['token_acceptance'])} of the {count(section['tested'])} tested\n"
    )


def _stability(section: Row) -> Table:
    rows = [
        (str(row["layer"]), kind, *_spread(row[name]))
        for row in _layers(section)
        for kind, name in (("within a sentence", "within"), ("across a boundary", "across"))
    ]
    title = f"Overlap coefficient of consecutive supports (of two random ones {number(section['chance'])})"
    return Table(title, ("layer", "steps", *SPREAD, "n"), rows, left=2)


def _taken(section: Row) -> str:
    taken, audited = section["layers_taken"], section["layers_audited"]
    return "" if taken == audited else f" ({taken:,} of {audited:,} audited layers, evenly chosen)"


def _head_similarity(section: Row) -> Part:
    layers = section["layers"]
    before = [value for value in section["previous_layer"] if value is not None]
    title = (
        f"Similarity of heads at the same step: {number(section['within'])} within a layer, "
        f"{number(section['between'])} between layers ({section['steps']:,} steps), "
        f"{number(sum(before) / len(before) if before else None)} with the layer before"
    )
    if len(layers) > MOST_LAYERS:
        return f"{title}; --json has the {len(layers)} layers\n"
    rows = [
        (str(layer), *(number(value, 2) for value in values))
        for layer, values in zip(layers, section["matrix"], strict=True)
    ]
    return Table(title, ("layer", *map(str, layers)), rows)


def _query_cosine(section: Row) -> Table:
    rows = [
        (
            str(row["layer"]),
            *(number(row[name]) for name in ("mean", "min")),
            *map(percent, row["below"]),
            count(row["n"]),
        )
        for row in _layers(section)
    ]
    title = "Query cosine with the step before; FreeKV corrects where it is under tau"
    return Table(title, ("layer", "mean", "min", *(f"under {tau:g}" for tau in section["thresholds"]), "n"), rows)


def _lowest_heads(section: Row) -> str:
    lowest = section["heads"][:LOWEST_HEADS]
    heads = (f"layer {row['layer']} head {row['head']} {number(row['mean'])}" for row in lowest)
    return f"lowest query cosine in {', '.join(heads)}\n"


def _compared(section: Row) -> str:
    kl = section["kl_next_token"]
    return (
        f"KL {number(kl['mean'], 4)} nats on average, p95 {number(kl['p95'], 4)}, at most {number(kl['max'], 4)}; "
        f"same most probable token in {percent(section['argmax_agreement'])} of {count(kl['n'])}"
    )


def _selections(section: Row) -> Table:
    names = {
        "overlap_previous": "overlap with the one before",
        "jaccard_previous": "Jaccard index with it",
        "lambda_star": "lambda*",
        "unread_estimate": "estimated attention not read",
        "score_margin": "last score chosen over first left",
    }
    rows = [
        (title, *_spread(section[name], 4 if name == "lambda_star" else 3))
        for name, title in names.items()
        if section[name]["n"]
    ]
    clipped = section["clipped_share"]
    title = "Selections" + ("" if clipped is None else f"; lambda* is clipped in {percent(clipped)} of them")
    return Table(title, ("", *SPREAD, "n"), rows)


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
DRIFT_TITLE = "Attention drift: overlap with the support of step 0"
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
