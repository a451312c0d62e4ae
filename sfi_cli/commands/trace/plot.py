"""`sfi trace plot`: figures of a trace."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sfi_cli import options as o
from sfi_cli.commands.trace.report import beside, make_folder, open_view
from sfi_cli.parsing import words
from sfi_cli.terminal.output import Output, message
from sfi_core.errors import ConfigError, TraceError, unknown

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
    top: Annotated[
        o.Number, _what("Only the most probable positions of each support.", shown="all that the audit recorded")
    ] = None,
    form: Annotated[str | None, o.option(o.OUTPUT, "png or svg.", "--format", shown="png")] = None,
    output: Annotated[
        o.File, o.output("A folder, or for one figure a .png or .svg.", shown="files DIR-KIND.png beside the trace")
    ] = None,
    force: o.Force = False,
) -> None:
    """Draw the figures of a paper or a README: overlap of supports, lambda*, retained mass, time.

    heatmap: overlap of every two steps' supports. lag: overlap by how many steps lie between. lambda: weight
    of the prior. retained: mass that fast steps kept, by layer and KV head. timeline: phases of each step.
    All but lambda and timeline need a trace of --audit 1. sfi trace report has more figures.

    For example:

      sfi trace plot run -o figures

      sfi trace plot run --kind heatmap --top 64 -o overlap.svg

      sfi trace plot run --kind lag,retained --layer 3 --head 1
    """
    from sfi_traces.figures import KINDS, check_matplotlib

    check_matplotlib("figures")
    asked = tuple(dict.fromkeys(words(kind)))
    paths = _paths(trace, asked or tuple(KINDS), form, output)
    chosen = open_view(trace, request, layer, head, top)
    with ExitStack() as stack:
        files = {name: stack.enter_context(Output(plot=path, force=force)) for name, path in paths.items()}
        _draw(chosen, files, asked=bool(asked))


def _paths(trace: Path, kinds: tuple[str, ...], form: str | None, output: Path | None) -> dict[str, Path]:
    from sfi_traces.figures import FORMATS, KINDS

    for kind in kinds:
        if kind not in KINDS:
            raise unknown("kind", kind, KINDS)
    if form not in (None, *FORMATS):
        raise ConfigError(f"format must be one of {FORMATS}, got {form}")
    if output is None:
        return {kind: beside(trace, f"{kind}.{form or 'png'}") for kind in kinds}
    if not output.suffix or output.is_dir():
        make_folder(output)
        name = trace.resolve().name
        return {kind: output / f"{name}-{kind}.{form or 'png'}" for kind in kinds}
    if len(kinds) > 1:
        raise ConfigError(f"output must be a folder for {len(kinds)} figures, got {output}")
    wanted = FORMATS if form is None else (form,)
    if output.suffix.removeprefix(".") not in wanted:
        raise ConfigError(f"output must end in one of {wanted}, got {output.name}")
    return {kinds[0]: output}


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
