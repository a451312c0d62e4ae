"""`sfi trace plot`: figures of a trace."""

from pathlib import Path
from typing import Annotated

from sfi_cli import options as o

WHAT = "What to draw"


def plot(
    trace: o.TraceDir,
    kind: Annotated[
        list[str] | None,
        o.option(
            WHAT,
            "heatmap, lag, lambda, retained, timeline; comma list or repeated.",
            shown="all that the trace has data for",
        ),
    ] = None,
    request: Annotated[int | None, o.option(WHAT, "The request.", shown="the first")] = None,
    layer: Annotated[
        int | None,
        o.option(WHAT, "Only this layer; not of the timeline.", shown="the mean over all"),
    ] = None,
    head: Annotated[
        int | None,
        o.option(WHAT, "Only this KV head; not of the timeline.", shown="the mean over all"),
    ] = None,
    top: Annotated[
        int | None,
        o.option(
            WHAT,
            "Only the most probable positions of each support.",
            shown="all that the audit recorded",
        ),
    ] = None,
    form: Annotated[str | None, o.option(o.OUTPUT, "png or svg.", "--format", shown="png")] = None,
    output: Annotated[
        Path | None,
        o.option(
            o.OUTPUT,
            "A folder, or for one figure a .png or .svg.",
            "--output",
            "-o",
            shown="files DIR-KIND.png beside the trace",
        ),
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
    from sfi_cli.commands.trace.figure_jobs import PlotJob
    from sfi_cli.parsing import words

    PlotJob(
        trace=trace, kinds=tuple(words(kind)), request=request, layer=layer, head=head,
        top=top, form=form, output=output, force=force,
    ).run()  # fmt: skip
