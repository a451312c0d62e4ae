"""What `sfi trace show` prints, from its document: a screen."""

from collections.abc import Iterator

from sfi_cli.commands.trace.check import finding_lines
from sfi_cli.terminal.tables import Part
from sfi_traces.views.facts import disagreement, facts, run_table
from sfi_traces.views.table import Row, Table, count, number, plural

MOST_REQUESTS, MOST_STEPS, LONGEST = 3, 3, 150  # requests, disagreements, characters of an answer


def show_text(document: Row) -> list[Part]:
    """Return a screen: what ran, its answer, where full attention differs, health and speed."""
    run = document["run"]
    left_out = {"audit", "begun", *["finished"] * bool(run["finished"] and not run["stopped"])}
    rows = [row for row in run_rows(document) if row[0] not in left_out]
    for one in facts(document):
        rows.append((one.name, f"{one.value}, {one.note}"))
        if one.name == "full attention's token":
            rows += [("", line) for line in _disagreements(document["disagreements"])]
        if one.name == "health":
            rows += [("", line) for line in finding_lines(document["health"], "problem")]
    more = f"sfi trace show {document['trace']} --full has every table, --step N what a step read"
    return [Table("", (), [*rows, ("more", f"{more}; sfi trace report draws it")])]


def run_rows(document: Row) -> Iterator[tuple[str, str]]:
    """Yield what ran, its answers, and how many steps were replayed as CUDA graphs."""
    run, graphs = document["run"], document["steps"]
    yield from ((name, value) for name, value in run_table(run).rows)
    steps = {one["request"]: one for one in run["requests"]}
    for one in document["answers"][:MOST_REQUESTS]:
        own = steps[one["request"]]
        text = "left out" if one["text"] is None else repr(one["text"])
        if len(text) > LONGEST:
            text = f"{text[: LONGEST - 30]} ... {text[-30:]}"
        prompt = f"{count(own['prompt_tokens'])} tokens of prompt, {plural(own['steps'], 'step')}"
        yield f"request {one['request']}", f"{prompt}: {text}"
    if (more := len(document["answers"]) - MOST_REQUESTS) > 0:
        yield "", f"and {plural(more, 'more request')}"
    if graphs["replayed"] or run["not_replayed"]:
        replayed = f"{graphs['replayed']:,} of {plural(graphs['launched'], 'decoding step')} replayed"
        yield "CUDA graphs", replayed + (f": {run['not_replayed']}" if run["not_replayed"] else "")


def _disagreements(found: list[Row]) -> Iterator[str]:
    several = len({one["request"] for one in found}) > 1
    for one in found[:MOST_STEPS]:
        request = f"request {one['request']}, " * several
        yield f"{request}step {one['step']}: {disagreement(one)}, KL {number(one['kl_next_token'])}"
    if (more := len(found) - MOST_STEPS) > 0:
        yield f"and {plural(more, 'more step')}"
