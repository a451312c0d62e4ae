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
    for row in facts(document):
        rows.append((row.name, f"{row.value}, {row.note}"))
        if row.name == "full attention's token":
            rows += [("", line) for line in _disagreements(document["disagreements"])]
        if row.name == "health":
            rows += [("", line) for line in finding_lines(document["health"], "problem")]
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
