"""A request of a trace, or of two traces beside each other, as one HTML file that loads nothing."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sfi_core.errors import TraceError, not_installed
from sfi_core.machine.text import printable
from sfi_traces.health import judge
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Row
from sfi_traces.report.packed_reads import what_steps_read
from sfi_traces.report.text import disagreements, generated, prompt
from sfi_traces.summary import sections
from sfi_traces.views.captions import subject
from sfi_traces.views.facts import SECTIONS, Fact, facts, further_facts, latency_table, run_table, trigger_table
from sfi_traces.views.table import Table, numbers_table, overlap_tables, place_words

HERE = Path(__file__).parent
BESIDE = ("heatmap", "retained", "timeline")  # figures of two traces
# facts with a card of their own; health has a section
CARDS = ("full attention's token", "drafts kept", "retained mass", "cache read", "tokens/s")
AROUND = 40  # tokens shown before the first difference, and after it
NONE = "-"


def check_report() -> None:
    """Raise `BackendError` if Plotly or Jinja2 is not installed."""
    for module, name in (("plotly", "Plotly"), ("jinja2", "Jinja2")):
        if find_spec(module) is None:
            raise not_installed("the report needs", name, "report")


def render(request: Request) -> str:
    """Return the report of a request; a figure without data says what records it."""
    figures, missing = {}, []
    for name, figure in _drawn(request):
        if isinstance(figure, str):
            missing.append(figure)
        else:
            figures[name] = figure
    summary = {"health": judge(request)} | sections(request, SECTIONS)
    words = None
    try:
        words = what_steps_read(request)
    except TraceError as error:
        missing.append(str(error))
    known = [*facts(summary), *further_facts(summary)]
    others = [(fact.name, f"{fact.value}, {fact.note}") for fact in known if fact.name not in (*CARDS, "health")]
    return _page(
        "page.html",
        ("page.js", "reading.js"),
        command="report",
        name=request.trace.path.resolve().name,
        subjects=[subject(request)],
        health=summary["health"],
        cards=[fact for name in CARDS for fact in known if fact.name == name],
        tables=[
            Table("Other numbers", (), others),
            run_table(summary["run"]),
            latency_table(summary["latency"]),
            trigger_table(summary["triggers"]),
        ],
        captions={name: figure.pop("caption") for name, figure in figures.items()},
        figures=figures,
        missing=list(dict.fromkeys(missing)),
        text=generated(request),
        disagreements=disagreements(request, summary["disagreements"]),
        prompt=prompt(request),
        words=words,
    )


def render_diff(first: Request, second: Request, document: Row) -> str:
    """Return the page of one request of two traces; `document` is the result of `compare`."""
    requests = {"a": first, "b": second}
    (row,) = (row for row in document["requests"] if row["request"] == first.index)
    drawn = {f"{name}-{side}": figure for side, request in requests.items() for name, figure in _drawn(request, BESIDE)}
    names = [request.trace.path.resolve().name for request in requests.values()]
    settings = [(name, str(pair["a"]), str(pair["b"])) for name, pair in document["settings"].items()]
    changed = Table("Settings that differ", ("", "A", "B"), settings)
    return _page(
        "diff.html",
        ("page.js",),
        command="diff",
        name=" and ".join(names),
        subjects=[
            f"{side}: {name}, {subject(request)}"
            for side, name, request in zip("AB", names, requests.values(), strict=True)
        ],
        cards=_cards(row, document),
        text=_text(requests, row),
        names_of_figures=BESIDE,
        figures={name: figure for name, figure in drawn.items() if not isinstance(figure, str)},
        missing={name: why for name, why in drawn.items() if isinstance(why, str)},
        tables=[numbers_table(document), *overlap_tables(document), changed],
    )


def _drawn(request: Request, names: Sequence[str] = ()) -> Iterator[tuple[str, Row | str]]:
    # what each figure's script and section need, by name, of all figures or some; or why the figure is missing
    from sfi_traces.report import observation_figures, raster_figure, step_figures  # noqa: PLC0415 - Plotly is an extra

    figures = {
        "heatmap": step_figures.heatmap,
        "lag": step_figures.lag,
        "retained": step_figures.retained,
        "drift": observation_figures.drift,
        "head-similarity": observation_figures.head_similarity,
        "query-cosine": observation_figures.query_cosine,
        "corrections": observation_figures.corrections,
        "acceptance": observation_figures.acceptance,
        "raster": raster_figure.raster,
        "timeline": step_figures.timeline,
        "lambda": step_figures.lambda_star,
    }
    for name in names or figures:
        try:
            yield name, figures[name](request).plain()
        except TraceError as error:
            yield name, str(error)


def _cards(row: Row, document: Row) -> list[Fact]:
    at, layer = row["first_difference"], row["first_layer"]
    supports, speed = document["supports"], document["ratios"]["tokens_per_second"]
    known = row["equal_share"] is not None
    return [
        Fact("First other token", f"step {at['step']:,}" if at else "none" if known else NONE,
             f"{row['compared_steps']:,} steps compared" if known else "token ids were left out"),
        Fact("First other layer", f"layer {layer['layer']}" if layer else NONE,
             place_words(layer) if layer else "no support or selection of both differs"),
        Fact("Equal tokens", f"{row['equal_share']:.1%}" if known else NONE,
             f"of {min(row['steps'].values()):,} that both have"),
        Fact("Overlap of supports", f"{supports['overlap']['mean']:.3f}" if supports else NONE,
             "mean at equal steps" if supports else "record both with --audit N"),
        Fact("Speed", f"{speed:.2f}x" if speed else NONE, "tokens a second, B over A"),
    ]  # fmt: skip


def _text(requests: Mapping[str, Request], row: Row) -> Row:
    first = row["first_difference"]
    if first is None:
        said = "No token differs." if row["equal_share"] is not None else "Token ids were left out."
        return {"note": said, "lines": []}
    lines = []
    for side, request in requests.items():
        steps = request.steps
        at = int(steps.rows(first["step"]))
        begin = max(0, at - AROUND)
        lines.append(
            {
                "side": side.upper(),
                "step": int(steps.step[begin]),
                "before": printable("".join(steps.text[begin:at])),
                "token": printable(steps.text[at]) or f"id {first[side]['token_id']}",
                "after": printable("".join(steps.text[at + 1 : at + 1 + AROUND])),
                "about": f"step {first['step']}: {'slow' if steps.slow[at] else 'fast'}, "
                f"token {first[side]['token_id']}",
            }
        )
    return {"note": f"At step {first['step']:,}, marked.", "lines": lines}


def _page(template: str, scripts: Sequence[str], **values: Any) -> str:
    # fills a template of this folder: style, scripts and Plotly are in the page
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - an extra
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 - an extra

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(
        **values,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script="\n".join((HERE / name).read_text(encoding="utf-8") for name in scripts),
        plotly=get_plotlyjs(),
    )
