"""`sfi trace plot`: figures of a trace."""

from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o

WHAT = "What to draw"


def plot(
    trace: o.TraceDir,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="heatmap, lag, lambda, retained, timeline; comma list or repeated.",
            show_default="all that the trace has data for",
            rich_help_panel=WHAT,
        ),
    ] = None,
    request: Annotated[
        int | None,
        typer.Option(help="The request.", show_default="the first", rich_help_panel=WHAT),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Only this layer; not of the timeline.",
            show_default="the mean over all",
            rich_help_panel=WHAT,
        ),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            help="Only this KV head; not of the timeline.",
            show_default="the mean over all",
            rich_help_panel=WHAT,
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            help="Only the most probable positions of each support.",
            show_default="all that the audit recorded",
            rich_help_panel=WHAT,
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help="png or svg.", show_default="png", rich_help_panel=o.OUTPUT),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A folder, or for one figure a .png or .svg.",
            show_default="files DIR-KIND.png beside the trace",
            rich_help_panel=o.OUTPUT,
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
