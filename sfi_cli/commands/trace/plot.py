"""`sfi trace plot`: figures of a trace."""

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

from sfi_cli import options as o
from sfi_cli.commands.trace.report import beside, make_folder, open_view
from sfi_cli.parsing import words
from sfi_cli.terminal.output import Output, message
from sfi_core.errors import TraceError, unknown

if TYPE_CHECKING:  # numpy and Arrow take time
    from sfi_traces.model.request import Request

_what = partial(o.option, "What to draw")


def plot(
    trace: o.TraceDir,
    kind: Annotated[
        o.Words,
        _what(
            "heatmap, lag, lambda, retained, timeline; comma list or repeated.", shown="all that the trace has data for"
        ),
    ] = None,
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
    from sfi_traces.figures import FORMATS, KINDS, check_matplotlib

    check_matplotlib("figures")
    asked = words(kind)
    for name, value, known in (*(("kind", each, KINDS) for each in asked), ("format", form, FORMATS)):
        if value not in known:
            raise unknown(name, value, known)
    chosen = open_view(trace, request, layer, head)
    if output is not None:
        make_folder(output)
    folder = trace.resolve()
    paths = {
        name: beside(trace, f"{name}.{form}") if output is None else output / f"{folder.name}-{name}.{form}"
        for name in asked or KINDS
    }
    with ExitStack() as stack:
        files = {name: stack.enter_context(Output(plot=path, force=force)) for name, path in paths.items()}
        _draw(chosen, files, asked=bool(asked))


def _draw(request: "Request", files: dict[str, Output], *, asked: bool) -> None:
    from sfi_traces.figures import KINDS, save

    lacking = []
    for kind, file in files.items():
        try:
            figure = KINDS[kind](request)
        except TraceError as error:
            if asked:
                raise
            message(f"left out {kind}: {error}")
            lacking.append(error)
            continue
        file.figure(save, figure)
    if len(lacking) == len(files):
        raise lacking[0]
