"""What `sfi trace show` prints, from its document: a screen, or a step."""

from collections.abc import Iterator, Sequence
from functools import partial

from sfi_cli.commands.trace.check import finding_lines
from sfi_cli.terminal.tables import Part
from sfi_core.machine.text import printable
from sfi_traces.views.facts import disagreement, facts, run_table
from sfi_traces.views.table import Columns, Row, Table, count, dense_words, number, plural

MOST_REQUESTS, MOST_STEPS, LONGEST = 3, 3, 150  # requests, disagreements, characters of an answer


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
        text = "left out" if row["text"] is None else repr(row["text"])
        if len(text) > LONGEST:
            text = f"{text[: LONGEST - 30]} ... {text[-30:]}"
        prompt = f"{count(about['prompt_tokens'])} tokens of prompt, {plural(about['steps'], 'step')}"
        yield f"request {row['request']}", f"{prompt}: {text}"
    if (more := len(document["answers"]) - MOST_REQUESTS) > 0:
        yield "", f"and {plural(more, 'more request')}"
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


MOST_ROWS = 20
LONGEST_PASSAGE, LONGEST_HEADS = 90, 36  # characters
MOST_REFRESHES = 6


def step_text(step: Row) -> list[Part]:
    """Return facts of the step, the passages that it read, and the passages that it missed."""
    parts: list[Part] = [Table("", (), [*_lines(step)]), ""]
    parts += [f"note: {note}" for note in step["notes"]]
    title = "Passages that it read"
    if any(passage["part"] == "all" for passage in step["passages"]):
        title = "Passages it looked at most, of all that it read"
    parts.append(_passages(title, step, step["passages"]))
    if step["missed"]:
        title = "Passages that dense attention looked at, and the step did not read"
        parts.append(_passages(title, step, step["missed"]))
    elif not step["masses"]:
        parts.append("not recorded: mass, for the imported file has none")
    elif not step["audited"]:
        parts.append("not recorded: mass, and what the step should have read (audit the step: --audit N)")
    return parts


def _lines(step: Row) -> Iterator[tuple[str, str]]:
    kind = f"slow, {step['reason']}" if step["slow"] else "fast"
    yield "step", f"{step['step']}: {kind}, gave {printable(step['token'])!r}"
    if dense := step["dense"]:
        same = "the same token" if dense["argmax_agrees"] else dense_words(dense)
        yield "full attention", f"{same}, KL {number(dense['kl_next_token'], 4)}"
    yield ("read", f"{number(step['attended'], 0)} of {count(step['context'])} tokens a KV head, on average")
    refreshed = step["refreshed"]
    if refreshed:
        shown = ", ".join(map(str, refreshed[-MOST_REFRESHES:]))
        more = f", and {len(refreshed) - MOST_REFRESHES:,} earlier ones" * (len(refreshed) > MOST_REFRESHES)
        yield "selected at", f"step {shown}{more}"
    looked = _heads(step["places"])
    audited = _heads(step["audited"])
    audit = f", {audited or 'none'} of them audited at this step" * step["masses"]
    yield "of", plural(looked, "KV head") + audit


def _passages(title: str, step: Row, passages: Sequence[Row]) -> Table:
    if (more := len(passages) - MOST_ROWS) > 0:
        title += f"; the first {MOST_ROWS}, and {more:,} more in --json"
    if step["audited"]:
        held = sum(passage["mass"] or 0.0 for passage in passages)
        title += f"; all hold {held:.1%} of the attention"
    return Table.of(title, PASSAGES, passages[:MOST_ROWS], left=4, spare=("layer: heads", "tokens"))


def _heads(places: Sequence[Row]) -> int:
    return sum(len(place["heads"]) for place in places)


def _where(places: Sequence[Row]) -> str:
    text = "; ".join(f"{place['layer']}: {' '.join(map(str, place['heads']))}" for place in places)
    return text if len(text) <= LONGEST_HEADS else f"{text[: LONGEST_HEADS - 1]}…"


def _shortened(text: str) -> str:
    text = printable(text)
    if len(text) <= LONGEST_PASSAGE:
        return text
    half = (LONGEST_PASSAGE - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


PASSAGES: Columns = {
    "positions": lambda passage: f"{passage['first']}-{passage['last']}",
    "part": (str, "part"),
    "text": (_shortened, "text"),
    "layer: heads": (_where, "places"),
    "heads": (count, "heads"),
    "tokens": (count, "tokens"),
    "mass": (partial(number, digits=4), "mass"),
}
