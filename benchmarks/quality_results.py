"""The table and the figure of `benchmarks/quality.sh`, from the results folders of its parts."""

from pathlib import Path
from typing import Any

from sfi_cli.commands.evaluate.job import document_of
from sfi_core.measure.evaluation.statistics import wilson_of
from sfi_core.measure.evaluation.weighted import mover
from sfi_traces.figures.style import check_plot
from sfi_traces.results.evaluation.plots import write_plot
from sfi_traces.results.evaluation.store import ResultsFolder

TABLE, FIGURE = "quality.md", "quality.png"
Row = dict[str, Any]


def write_results(out: Path, plan: dict[str, Any]) -> None:
    """Write quality.md and quality.png from the parts that there are.

    A part's score, and what was read for it, is the mean over the part's tasks. Its interval is that of the
    averages of `sfi eval`; of a harness task it takes the mean and the number of documents.
    """
    rows, model = [], {"name": plan["model"]}
    for part in plan["parts"]:
        folder = out / part["name"]
        if not (folder / "manifest.json").exists():
            continue
        document = document_of(ResultsFolder.resume(folder), {})
        model = document["model"]
        own = _of_harness(document, part) if part["harness"] else _of_tasks(document)
        state = "" if document["finished"] else " (not complete)"
        facts = {"task": part["name"] + state, "length": None, "drawn": part["decodes"]}
        rows += [{**row, **facts} for row in own]
    path = out / TABLE
    path.write_text(_markdown(rows, plan, model))
    print(path.read_text())
    drawn = [row for row in rows if row["drawn"] and row["score"] is not None]
    if drawn:
        check_plot(out / FIGURE)
        write_plot({"model": model, "rows": drawn}, out / FIGURE, kind="png")
        print(f"Wrote {path} and {out / FIGURE}")


def _of_tasks(document: Row) -> list[Row]:
    keys = ("method", "policy", "size", "score", "low", "high", "read", "n")
    return [{key: row[key] for key in keys} for row in document["averages"]]


def _of_harness(document: Row, part: Row) -> list[Row]:
    # a metric for each task: RULER's at this length, else the first that is named
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in document["harness"]:
        if row["error"] or row["task"] == "ruler":
            continue
        if part["task"] == "ruler" and row["metric"] != str(part["prompt"]):
            continue
        found.setdefault((row["method"], row["size"]), {}).setdefault(row["task"], row)
    return [_mean(list(tasks.values())) for tasks in found.values()]


def _mean(rows: list[Row]) -> Row:
    share = 1 / len(rows)
    score = mover([(share, wilson_of(row["value"], row["samples"])) for row in rows])
    return {
        **{key: rows[0][key] for key in ("method", "policy", "size")},
        "score": score.mean,
        "low": score.low,
        "high": score.high,
        "n": score.n,
        "read": sum(share * row["read"] for row in rows),
    }


def _markdown(rows: list[Row], plan: Row, model: Row) -> str:
    parts = list(dict.fromkeys(row["task"] for row in rows))
    cells = {(row["method"], row["size"], row["task"]): row for row in rows}
    lines = [
        f"# Quality of {model['name']}",
        "",
        "Score in percent with its 95 % interval, and what was read of the context. Budgets are selected",
        "tokens per KV head; `all` is full attention. A part that the prompt settles has full attention's",
        "score under every method, and was run under full attention alone.",
        "",
        "| method | size | " + " | ".join(parts) + " |",
        "|---|---|" + "---|" * len(parts),
    ]
    for method, size in dict.fromkeys((row["method"], row["size"]) for row in rows):
        values = (_cell(cells.get((method, size, part))) for part in parts)
        lines.append(f"| {method} | {size} | " + " | ".join(values) + " |")
    lines += ["", *(f"Left out: {line}." for line in plan["left_out"])]
    return "\n".join(lines).rstrip() + "\n"


def _cell(row: Row | None) -> str:
    if row is None or row["score"] is None:
        return "-"
    score, low, high = (100 * row[name] for name in ("score", "low", "high"))
    return f"{score:.1f} ({low:.1f}-{high:.1f}), {row['read']:.0%}"
