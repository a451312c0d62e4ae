"""`sfi trace plot` and `sfi trace report`: figures of a trace, and all of it as one HTML file."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfi_cli import options as o
from sfi_cli.parsing import words
from sfi_cli.terminal.output import Output, message
from sfi_core.errors import TraceError, require, unknown
from sfi_core.machine.files import writing

if TYPE_CHECKING:  # numpy and Arrow take time
    from sfi_traces.model.request import Request


_what = partial(o.option, "What to draw")


def plot(
    trace: o.TraceDir,
    kind: Annotated[o.Words, _what("heatmap, lag, lambda, retained, timeline; may repeat.", shown="all")] = None,
    request: Annotated[o.Number, _what("The request.", shown="the first")] = None,
    layer: Annotated[o.Number, _what("Only this layer; not of the timeline.", shown="the mean over all")] = None,
    head: Annotated[o.Number, _what("Only this KV head; not of the timeline.", shown="the mean over all")] = None,
    form: Annotated[str, o.option(o.OUTPUT, "png or svg.", "--format")] = "png",
    output: Annotated[o.File, o.output("A folder for DIR-KIND.png.", shown="beside the trace")] = None,
    force: o.Force = False,
) -> None:
    """Draw the figures of a paper or a README: overlap of supports, lambda*, retained mass, time.

    heatmap: overlap of every two steps' supports. lag: overlap by how many steps lie between. lambda: weight
    of the prior. retained: mass that fast steps kept, by layer and KV head. timeline: phases of each step.
    All but lambda and timeline need a trace of --audit 1. sfi trace report has more figures.

    For example:

      sfi trace plot run -o figures

      sfi trace plot run --kind heatmap --format svg

      sfi trace plot run --kind lag,retained --layer 3 --head 1
    """
    from sfi_traces.figures import FORMATS, KINDS, check_matplotlib, save

    check_matplotlib("figures")
    asked = words(kind)
    for name, value, known in (*(("kind", each, KINDS) for each in asked), ("format", form, FORMATS)):
        if value not in known:
            raise unknown(name, value, known)
    chosen = open_view(trace, request, layer, head)
    if output is not None:
        make_folder(output)
    lacking = []
    with ExitStack() as stack:
        files: dict[str, Output] = {}
        for name in asked or KINDS:
            path = beside(trace, f"{name}.{form}")
            path = path if output is None else output / path.name
            files[name] = stack.enter_context(Output(plot=path, force=force))
        for name, file in files.items():
            try:
                figure = KINDS[name](chosen)
            except TraceError as error:
                if asked:
                    raise
                message(f"left out {name}: {error}")
                lacking.append(error)
            else:
                file.figure(save, figure)
    if len(lacking) == len(files):
        raise lacking[0]


def report(
    trace: o.TraceDir,
    request: Annotated[o.Number, typer.Option(help="The request.", show_default="the first")] = None,
    output: Annotated[o.File, o.output("The HTML file.", shown="DIR-report.html beside the trace")] = None,
    force: o.Force = False,
) -> None:
    """Write one HTML file with interactive figures, the summary and the generated text.

    The file works offline. It contains the prompt, unless the trace was recorded with trace.redact_text.

    For example:

      sfi trace report run

      sfi trace report run --request 2 -o run.html --force
    """
    from sfi_traces.report import render

    require("the report needs", "report", "plotly", "jinja2")
    view = open_view(trace, request)
    with Output(output or beside(trace, "report.html"), force=force) as file:
        file.text(render(view))


def beside(trace: Path, name: str) -> Path:
    """Name a file after a trace, in the trace's parent folder."""
    folder = trace.resolve()
    # the parent as the user wrote it, unless the trace is a path such as `.`
    place = trace.parent if trace.name == folder.name else folder.parent
    return place / f"{folder.name}-{name}"


def open_view(trace: Path, request: int | None, layer: int | None = None, head: int | None = None) -> "Request":
    """Open a trace and choose the part to show, as `Request` does; tell the user about other requests."""
    from sfi_traces.model.request import Request
    from sfi_traces.model.trace import Trace

    chosen = Request(Trace.open(trace), request, layer, head)
    if request is None and len(chosen.requests) > 1:
        message(f"showing {chosen.trace.unit} {chosen.index} of {len(chosen.requests)}; --request chooses another")
    return chosen


def make_folder(folder: Path) -> None:
    """Make a folder of outputs, if it is not there; raises `SfiError` if it cannot be made."""
    with writing(f"output {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
