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

OF_TIMES = ("latency", "break_even")  # sections left out for a trace without times
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
        ("lossless", lambda found: Table.of("Verifications by why the draft ended", REASONS, found["reasons"])),
        ("lossless", lambda found: Table.of(PLACES, {"place": _bin("place")} | TESTED, found["places"])),
        ("lossless", lambda found: Table.of(DEPTHS, {"depth": _bin("depth")} | TESTED, found["depths"])),
        ("triggers", trigger_table),
        ("stability", _stability),
        ("lags", _lags),
        ("drift", lambda found: Table.of(f"{DRIFT_TITLE}{_taken(found)}", DRIFT, found["bins"])),
        ("locality", lambda found: Table.of(f"{LOCALITY_TITLE}{_taken(found)}", LOCALITY, found["lags"])),
        ("head_similarity", _head_similarity),
        ("query_cosine", _query_cosine),
        ("query_cosine", _lowest_heads),
        ("audit", lambda found: Table.of(AUDIT_TITLE, AUDIT, _layers(found), spare=AUDIT_SPARE)),
        ("logits", lambda found: compared.format(_compared(found))),
        ("disagreements", partial(Table.of, DISAGREEMENT_TITLE, DISAGREEMENT, left=3)),
        ("selections", _selections),
        ("coverage", _coverage),
        ("corrections", _corrections),
        ("recalls", _recalls),
        ("latency", latency_table),
        ("reads", partial(Table.of, READS_TITLE, READS)),
        ("phases", _phases),
        ("break_even", _break_even),
    )
    timed = document["latency"]["kinds"]
    parts = [view(document[name]) for name, view in sections if document[name] and (timed or name not in OF_TIMES)]
    head = [*run_rows(document)]
    head += [(one.name, f"{one.value}, {one.note}") for one in facts(document) if one.name != "health"]
    return [Table("", (), head), "", *parts, *_missing(document["missing"])]


def _missing(lines: list[str]) -> list[str]:
    # all that an audit records in one line
    audited = [line for line in lines if "--audit" in line]
    if len(audited) > 1:
        names = "; ".join(line.partition(" (")[0] for line in audited)
        lines = [f"{names} (record with --audit 1)", *(line for line in lines if line not in audited)]
    return [f"not recorded: {line}" for line in lines]


def _layers(found: Row) -> list[Row]:
    # the values of all layers, and of each
    return [{"layer": "all", **found}, *found["layers"]]


def _spread(values: Row | None, digits: int = 3) -> list[str]:
    if values is None:
        return ["-"] * len(SPREAD) + ["0"]
    return [*(number(values[name], digits) for name in SPREAD), count(values["n"])]


def _bin(name: str) -> Any:
    # a column of bins of integers
    return lambda one: span(one[f"from_{name}"], one[f"to_{name}"])


def _of(name: str, part: str, write: Callable[[Any], str] = number) -> Callable[[Row], str]:
    # a column of a distribution's numbers
    return lambda one: write(one[name][part])


def _lossless(found: Row) -> str:
    each, passes = (number(found[name], 2) for name in ("tokens_per_verification", "passes_per_token"))
    kept = f"{count(found['accepted'])} of {count(found['drafted'])} drafted tokens"
    return (
        f"lossless: {plural(found['verifications'], 'verification')} gave {count(found['tokens'])} tokens, "
        f"{each} each, in {passes} passes a token; kept {kept} ({percent(found['acceptance'])}), "
        f"{percent(found['token_acceptance'])} of the {count(found['tested'])} tested\n"
    )


def _stability(found: Row) -> Table:
    rows = [
        (str(one["layer"]), kind, *_spread(one[name]))
        for one in _layers(found)
        for kind, name in (("within a sentence", "within"), ("across a boundary", "across"))
    ]
    title = f"Overlap coefficient of consecutive supports (of two random ones {number(found['chance'])})"
    return Table(title, ("layer", "steps", *SPREAD, "n"), rows, left=2)


def _lags(found: Row) -> Table:
    rows = []
    for lag in found["lags"]:
        mean, _, *others = _spread(lag["reuse"])
        refresh = _spread(lag["refresh"])
        rows.append((_bin("lag")(lag), mean, *others, refresh[0], refresh[-1]))
    since = "last refresh" if found["refreshes"] == "recorded" else "last step that Eq. 5 makes slow"
    title = f"Overlap with the support at the {since}, by steps since then"
    return Table(title, ("lag", "mean", *SPREAD[2:], "n", "at refreshes", "n"), rows)


def _taken(found: Row) -> str:
    taken, audited = found["layers_taken"], found["layers_audited"]
    return "" if taken == audited else f" ({taken:,} of {audited:,} audited layers, evenly chosen)"


def _head_similarity(found: Row) -> Part:
    layers = found["layers"]
    before = [value for value in found["previous_layer"] if value is not None]
    title = (
        f"Similarity of heads at the same step: {number(found['within'])} within a layer, "
        f"{number(found['between'])} between layers ({found['steps']:,} steps), "
        f"{number(sum(before) / len(before) if before else None)} with the layer before"
    )
    if len(layers) > MOST_LAYERS:
        return f"{title}; --json has the {len(layers)} layers\n"
    rows = [(str(one), *(number(value, 2) for value in row)) for one, row in zip(layers, found["matrix"], strict=True)]
    return Table(title, ("layer", *map(str, layers)), rows)


def _query_cosine(found: Row) -> Table:
    rows = [
        (
            str(one["layer"]),
            *(number(one[name]) for name in ("mean", "min")),
            *map(percent, one["below"]),
            count(one["n"]),
        )
        for one in _layers(found)
    ]
    title = "Query cosine with the step before; FreeKV corrects where it is under tau"
    return Table(title, ("layer", "mean", "min", *(f"under {tau:g}" for tau in found["thresholds"]), "n"), rows)


def _lowest_heads(found: Row) -> str:
    heads = (f"layer {one['layer']} head {one['head']} {number(one['mean'])}" for one in found["heads"][:LOWEST_HEADS])
    return f"lowest query cosine in {', '.join(heads)}\n"


def _compared(found: Row) -> str:
    kl = found["kl_next_token"]
    return (
        f"KL {number(kl['mean'], 4)} nats on average, p95 {number(kl['p95'], 4)}, at most {number(kl['max'], 4)}; "
        f"same most probable token in {percent(found['argmax_agreement'])} of {count(kl['n'])}"
    )


def _selections(found: Row) -> Table:
    names = {
        "overlap_previous": "overlap with the one before",
        "jaccard_previous": "Jaccard index with it",
        "lambda_star": "lambda*",
        "unread_estimate": "estimated attention not read",
        "score_margin": "last score chosen over first left",
    }
    rows = [
        (title, *_spread(found[name], 4 if name == "lambda_star" else 3))
        for name, title in names.items()
        if found[name]["n"]
    ]
    clipped = found["clipped_share"]
    title = "Selections" + ("" if clipped is None else f"; lambda* is clipped in {percent(clipped)} of them")
    return Table(title, ("", *SPREAD, "n"), rows)


def _coverage(found: Row) -> str:
    sampled = f", positions of every {found['every']}th refresh" if found["every"] > 1 else ""
    p5, p50, p95, most = (number(found["distance"][name], 0) for name in ("p5", "p50", "p95", "max"))
    return (
        f"selected: {percent(found['selected'])} of the prompt's positions by a KV head, "
        f"{percent(found['selected_by_any'])} by any; {p50} tokens behind the query (5 to 95 %: {p5} to {p95}, at most "
        f"{most}); a position stays for {number(found['stay'], 1)} refreshes{sampled}\n"
    )


def _corrections(found: Row) -> Table:
    places = [("all", found), *((f"layer {one['layer']}", one) for one in found["layers"])]
    places += [(f"{_bin('step')(one)} after a slow step", one) for one in found["since_slow"]]
    rows = [(place, percent(one["share"]), count(one["corrected"]), count(one["n"])) for place, one in places]
    cosine = number(found["query_cosine"])
    title = f"Corrections of fast steps x layers x KV heads; their query cosine is {cosine} on average"
    return Table(title, ("", "corrected", "corrections", "n"), rows)


def _recalls(found: Row) -> str:
    return (
        f"recalled from the host: {number(found['step_bytes'], 0)} bytes a step ({count(found['rows'])} rows "
        f"in {count(found['steps'])} steps), waited {duration(found['step_waited_us'])} a step\n"
    )


def _phases(found: Row) -> Table:
    rows = [{"part": part, **one} for part, spans in found.items() for one in spans]
    return Table.of("Time by phase", PHASES, rows, left=2, spare=("spans",))


def _break_even(found: Row) -> str:
    if found["context_tokens"] is None:
        return f"break-even context length: unknown, {found['reason']}"
    return (
        f"break-even context length: {found['context_tokens']:,.0f} tokens (dense attention "
        f"{number(found['dense_us_per_token'], 4)} us per cached token, fast {duration(found['fast_us'])} a "
        f"step, refresh {number(found['select_us_per_token'] or 0.0, 4)} us per cached token and "
        f"{duration(found['pack_us'] or 0.0)}, {percent(found['slow_share'])} slow)"
    )


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
LOCALITY_TITLE = "Temporal locality: overlap of every two audited steps"
LOCALITY: Columns = {"steps apart": _bin("lag"), "mean": (number, "mean"), "pairs": (count, "pairs")}
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
    "step": lambda one: f"{one['step']}" + (f" of request {one['request']}" if one["request"] else ""),
    "gave": lambda one: "(left out)" if one["token_text"] is None else quoted(one["token_text"]),
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
    "phase": lambda one: one["name"] + ("" if one["stream"] == "main" else f" ({one['stream']})"),
    "share": (percent, "share"),
    "total": (duration, "total_us"),
    "per step with it": (duration, "step_us"),
    "spans": (count, "spans"),
}
