"""A request of a trace as one HTML file that loads nothing."""

from pathlib import Path

from sfi_core.errors import TraceError
from sfi_traces.health import judge
from sfi_traces.model.request import Request
from sfi_traces.report.text import disagreements, generated, what_steps_read
from sfi_traces.summary import sections
from sfi_traces.views.captions import subject
from sfi_traces.views.facts import SECTIONS, facts, latency_table, run_table, trigger_table
from sfi_traces.views.table import Table

HERE = Path(__file__).parent
# facts with a card of their own; health has a section
CARDS = ("full attention's token", "drafts kept", "retained mass", "cache read", "tokens/s")


def render(request: Request) -> str:
    """Return the report of a request; a figure without data says what records it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - an extra
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 - an extra

    from sfi_traces.report import figures as panels  # noqa: PLC0415 - Plotly is an extra

    figures, missing = {}, []
    for name, draw in {
        "heatmap": panels.heatmap,
        "lag": panels.lag,
        "retained": panels.retained,
        "drift": panels.drift,
        "head-similarity": panels.head_similarity,
        "query-cosine": panels.query_cosine,
        "timeline": panels.timeline,
        "lambda": panels.lambda_star,
    }.items():
        try:
            figures[name] = draw(request)
        except TraceError as error:
            missing.append(str(error))
    summary = {"health": judge(request)} | sections(request, SECTIONS)
    words = None
    try:
        words = what_steps_read(request)
    except TraceError as error:
        missing.append(str(error))
    known = list(facts(summary))
    others = [(fact.name, f"{fact.value}, {fact.note}") for fact in known if fact.name not in (*CARDS, "health")]
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
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
        words=words,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script="\n".join((HERE / name).read_text(encoding="utf-8") for name in ("page.js", "reading.js")),
        plotly=get_plotlyjs(),
    )
