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
            help="heatmap, raster, lag, lambda, drift, head-similarity, query-cosine, corrections, "
            "acceptance, retained, timeline; comma list or repeated.",
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
            show_default="the mean over all; of the raster, the one that retains least",
            rich_help_panel=WHAT,
        ),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            help="Only this KV head; likewise.", show_default="likewise", rich_help_panel=WHAT
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            help="Only the most probable positions of each support.",
            show_default="all that the audit recorded; of the raster, the budget",
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
    """Draw what the model attended to: supports, their overlap, lambda*, retained mass, time.

    heatmap: overlap of every two steps' supports. raster: positions of each step's support. lag: overlap by
    how many steps lie between. lambda: weight of the prior. drift: overlap with the prompt's support, by
    step. head-similarity: overlap of the heads of each two layers. query-cosine: of each step's query with
    the one before, by layer and KV head, and the lowest heads by step. corrections: how often FreeKV
    corrected, by layer and KV head. acceptance: drafted tokens that a lossless run kept, by place in the
    sentence and by depth in the draft. retained: mass that fast steps kept, by layer and KV head. timeline:
    phases of each step. All but lambda, corrections, acceptance and timeline need a trace of --audit 1.

    For example:

      sfi trace plot run -o figures

      sfi trace plot run --kind heatmap --top 64 -o overlap.svg

      sfi trace plot run --kind raster,lag --layer 3 --head 1

      sfi trace plot run --kind drift,head-similarity,query-cosine
    """
    from sfi_cli.commands.trace.figure_jobs import PlotJob
    from sfi_cli.parsing import words

    PlotJob(
        trace=trace, kinds=tuple(words(kind)), request=request, layer=layer, head=head,
        top=top, form=form, output=output, force=force,
    ).run()  # fmt: skip
