"""`sfi trace replay`: what other settings would have done on a recorded run, and the run step by step."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli import options as o

SLOW, MEMORY, PLAY = "When a step is slow", "What a fast step reads", "Playing the run"
# a value, or several with commas between; without the option the trace's own
Values = str | None


def _grid(help_text: str, panel: str, name: str | None = None) -> Any:
    return typer.Option(
        *([name] if name else []),
        help=help_text,
        show_default="the trace's own",
        rich_help_panel=panel,
    )


def replay(
    trace: o.TraceDir,
    trigger_policy: Annotated[
        Values, _grid("boundary, t-max, stride, cosine, random, never, always.", SLOW)
    ] = None,
    triggers: Annotated[
        list[str] | None,
        _grid(
            "A string that ends a sentence; repeat for more. \\n is a newline.", SLOW, "--trigger"
        ),
    ] = None,
    trigger_id: Annotated[Values, _grid("Token ids that end a sentence.", SLOW)] = None,
    trigger_set: Annotated[
        list[str] | None,
        typer.Option(
            help="A set of such strings, blanks between: NAME='. ? !'. Repeat to compare sets.",
            rich_help_panel=SLOW,
        ),
    ] = None,
    t_max: Annotated[Values, _grid("Most fast steps in a row.", SLOW)] = None,
    min_gap: Annotated[
        Values, _grid("Steps after a slow step in which triggers do not count.", SLOW)
    ] = None,
    trigger_delay: Annotated[Values, _grid("Steps from a boundary to its slow step.", SLOW)] = None,
    slow_start: Annotated[Values, _grid("Steps from the first on that are slow.", SLOW)] = None,
    stride: Annotated[Values, _grid("Steps between slow steps under stride.", SLOW)] = None,
    cosine_threshold: Annotated[
        Values,
        _grid("Under cosine: slow if the last step's query moved further than this.", SLOW),
    ] = None,
    random_rate: Annotated[Values, _grid("Under random: a step's chance to be slow.", SLOW)] = None,
    seed: Annotated[Values, _grid("Of that chance.", SLOW)] = None,
    budget: Annotated[Values, _grid("Selected tokens per KV head (K).", MEMORY)] = None,
    recent: Annotated[Values, _grid("Tokens of the recent window.", MEMORY)] = None,
    recent_mode: Annotated[Values, _grid("anchored, sliding.", MEMORY)] = None,
    sink: Annotated[Values, _grid("Anchor tokens kept from the start.", MEMORY)] = None,
    span: Annotated[
        Values, _grid("Positions on each side that a hit brings along.", MEMORY)
    ] = None,
    request: o.RequestIndex = None,
    layers: o.AuditLayers = None,
    heads: o.AuditHeads = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Requests that share the weights in the byte model.")
    ] = 1,
    against: Annotated[
        Path | None,
        typer.Option(
            help="A real run of --policy sfi: predict its setting, beside what it measured."
        ),
    ] = None,
    play: Annotated[
        bool, typer.Option("--play", help="Step through the run.", rich_help_panel=PLAY)
    ] = False,
    step: Annotated[
        str | None,
        typer.Option(
            help="Print these steps, 12 or 12-20, instead of waiting for keys.",
            rich_help_panel=PLAY,
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(min=0.1, help="Steps a second of autoplay.", rich_help_panel=PLAY)
    ] = 4.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw retained mass against slow rate and speed-up to a .png or .svg.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = None,
    output: o.OutputPath = None,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    r"""Replay a trace of --audit 1 under other settings, without the model, or watch it with --play.

    The recorded tokens and attention are held fixed: how often a step would have been slow, what the reused
    memory would have held of the attention, what that costs. Values with commas between make a grid.

    For example:

      sfi trace replay dense --t-max 16,32,64 --budget 128,256,512 --plot replay.png

      sfi trace replay dense --trigger-set marks=". ? !" --trigger-set lines="\n" --json

      sfi trace replay dense --trigger-policy boundary,cosine,never --cosine-threshold 0.7,0.8

      sfi trace replay dense --against sfi-run

      sfi trace replay run --play
    """
    from sfi_cli.commands.trace.replay.grid import ReplayGrid
    from sfi_cli.commands.trace.replay.job import Choice, PlayJob, ReplayJob
    from sfi_cli.parsing import number_list
    from sfi_cli.terminal.output import Output

    grid = ReplayGrid(
        policies=trigger_policy, triggers=triggers, trigger_ids=trigger_id, trigger_sets=trigger_set,
        axes={
            "t_max": t_max, "min_gap": min_gap, "trigger_delay": trigger_delay, "slow_start": slow_start,
            "stride": stride, "cosine_threshold": cosine_threshold, "random_rate": random_rate,
            "trigger_seed": seed,
            "budget": budget, "recent": recent, "recent_mode": recent_mode, "sink": sink, "span": span,
        },
    )  # fmt: skip
    choice = Choice(
        trace=trace,
        request=request,
        layers=number_list(layers, "layers"),
        heads=number_list(heads, "heads"),
    )
    written = Output(output, plot=plot, force=force, json=json, quiet=quiet)
    if play:
        PlayJob(
            choice=choice, output=written, against=against, grid=grid, step=step, speed=speed
        ).run()
    else:
        ReplayJob(
            choice=choice, output=written, against=against, grid=grid, batch=batch, step=step
        ).run()
