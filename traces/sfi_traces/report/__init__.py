"""One request of a trace as one HTML file with figures, summary and text; it loads nothing."""

from importlib.util import find_spec
from typing import Any

from sfi_core.errors import TraceError, not_installed
from sfi_traces.health import judge
from sfi_traces.model.request import Request
from sfi_traces.report.packed_reads import what_steps_read
from sfi_traces.report.page import page
from sfi_traces.report.text import disagreements, generated, prompt
from sfi_traces.summary import sections
from sfi_traces.views.captions import subject
from sfi_traces.views.facts import SECTIONS, facts, further_facts, latency_table, run_table, trigger_table
from sfi_traces.views.table import Table

SCRIPTS = ("page.js", "reading.js")
# facts with a card of their own; health has a section
CARDS = ("full attention's token", "drafts kept", "retained mass", "cache read", "tokens/s")


def check_report() -> None:
    """Raise `BackendError` if Plotly or Jinja2 is not installed."""
    for module, name in (("plotly", "Plotly"), ("jinja2", "Jinja2")):
        if find_spec(module) is None:
            raise not_installed("the report needs", name, "report")


def render(request: Request) -> str:
    """Return the report of a request; a figure without data says what records it."""
    figures, missing = _figures(request)
    summary = {"health": judge(request)} | sections(request, SECTIONS)
    words = None
    try:
        words = what_steps_read(request)
    except TraceError as error:
        missing.append(str(error))
    found = [*facts(summary), *further_facts(summary)]
    others = [(one.name, f"{one.value}, {one.note}") for one in found if one.name not in (*CARDS, "health")]
    return page(
        "page.html",
        SCRIPTS,
        name=request.trace.path.resolve().name,
        subject=subject(request),
        health=summary["health"],
        cards=[one for name in CARDS for one in found if one.name == name],
        tables=[
            Table("Other numbers", (), others),
            run_table(summary["run"]),
            latency_table(summary["latency"]),
            trigger_table(summary["triggers"]),
        ],
        captions={name: figure.pop("caption") for name, figure in figures.items()},
        figures=figures,
        missing=missing,
        text=generated(request),
        disagreements=disagreements(request, summary["disagreements"]),
        prompt=prompt(request),
        words=words,
    )


def _figures(request: Request) -> tuple[dict[str, dict[str, Any]], list[str]]:
    # what each figure's script and section need, by name; and why other figures are missing
    from sfi_traces.report import observation_figures, raster_figure, step_figures  # noqa: PLC0415

    drawers = {
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
    figures, missing = {}, []
    for name, draw in drawers.items():
        try:
            figures[name] = draw(request).plain()
        except TraceError as error:
            missing.append(str(error))
    return figures, list(dict.fromkeys(missing))
