"""`sfi trace replay`: replay a recorded run under other settings, or watch it step by step."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.commands.trace.replay.views import replay_text, reuse_text
from sfi_cli.parsing import number_list
from sfi_cli.settings import SETTINGS, settings_for, texts
from sfi_cli.terminal.output import INTERRUPTED, Output, leave_interrupted
from sfi_core.errors import ConfigError, require

SLOW, MEMORY = "When a step is slow", "What a fast step reads"
_slow, OWN = partial(o.option, SLOW), "the trace's own"
REFRESH = "Reuse each recorded selection for so many steps: 1,2,4,8,16."
EVERY = (1, 2, 4, 8, 16)  # intervals that an imported trace is replayed with
SETS = "Another setting: span=0,10. Repeat for more; sfi config list has all settings."


def _part(what: str, example: str) -> Any:
    return typer.Option(help=f"Only these {what}: {example}.", show_default="all")


def replay(
    trace: o.TraceDir,
    trigger_policy: Annotated[o.Text, _slow(o.POLICIES_OF_TRIGGERS, shown=OWN)] = None,
    triggers: Annotated[o.Words, _slow(o.TRIGGER, "--trigger", shown=OWN)] = None,
    trigger_set: Annotated[o.Words, _slow(o.TRIGGER_SET)] = None,
    t_max: Annotated[o.Text, _slow(SETTINGS["t_max"].brief, shown=OWN)] = None,
    refresh_every: Annotated[o.Text, _slow(REFRESH, shown="off; for an imported trace these")] = None,
    budget: Annotated[o.Text, o.option(MEMORY, SETTINGS["budget"].brief, shown=OWN)] = None,
    sets: Annotated[o.Words, o.sets(MEMORY, SETS, "NAME=VALUES")] = None,
    request: o.RequestIndex = None,
    layers: Annotated[o.Text, _part("layers", "0,3,8-11")] = None,
    heads: Annotated[o.Text, _part("KV heads", "0,2-3")] = None,
    against: Annotated[
        o.File, typer.Option(help="Replay this sfi run's settings; compare with what it measured.")
    ] = None,
    play: Annotated[bool, typer.Option("--play", help="Step through the run in the terminal.")] = False,
    output: o.OutputPath = None,
    force: o.Force = False,
    wide: o.Wide = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    r"""Replay a trace of --audit 1 under other settings, without the model, or watch it with --play.

    The recorded tokens and attention stay as they are. The table shows for each setting the share of slow
    steps, the attention mass that the reused memory retains, and the bytes read. Values with commas between
    make a grid. --refresh-every shows how rarely a selection has to be made, also for an imported trace.

    For example:

      sfi trace replay dense --t-max 16,32,64 --budget 128,256,512

      sfi trace replay dense --trigger-set marks=". ? !" --trigger-set lines="\n" --json

      sfi trace replay dense --trigger-policy boundary,stride --set stride=8,16

      sfi trace replay dense --against sfi-run

      sfi trace replay imported --refresh-every 1,2,4,8,16

      sfi trace replay run --play
    """
    from sfi_cli.commands.trace.replay.documents import intervals, replay_document, replay_settings, reuse_document
    from sfi_traces.model.trace import Trace

    axes = texts(
        settings_for("trace replay"), sets, {"trigger_policy": trigger_policy, "t_max": t_max, "budget": budget}
    )
    others = bool(axes or triggers or trigger_set)
    part = {"request": request, "layers": number_list(layers, "layers"), "heads": number_list(heads, "heads")}
    written = Output(output, force=force, json=json, quiet=quiet, wide=wide)
    opened = Trace.open(trace)
    if play:
        if others or json or any((refresh_every, against, output)):
            raise ConfigError("play shows the run as it was and must come without other settings and output")
        _play(opened, part)
        return
    reuses = refresh_every is not None or opened.imported is not None
    if reuses:
        _check_reuse(axes, against)
    elif against is not None and others:
        raise ConfigError("against replays the other trace's setting and must come without others")
    with written:
        settings: list[Any] = []
        if others or not (reuses or against):
            settings = replay_settings(opened, axes, triggers, trigger_set, written.say)
        if reuses:
            every = intervals(refresh_every, () if others else EVERY)
            written.data(reuse_document(opened, part, every, settings, quiet=quiet), reuse_text)
        else:
            own_budget = "budget" not in axes
            document = replay_document(opened, against, part, settings, own_budget=own_budget, quiet=quiet)
            written.data(document, replay_text)


def _check_reuse(axes: dict[str, str], against: Path | None) -> None:
    # selections are reused as they are: neither memory nor bytes are modelled
    from sfi_traces.replay.setting import MEMORY

    if against is not None:
        raise ConfigError(f"against needs a recorded run's memory and bytes, got {against}")
    for name in MEMORY:
        if name in axes:
            raise ConfigError(
                f"{name} must come without --refresh-every and an imported trace: selections are reused as they are"
            )


def _play(trace: Any, part: dict[str, Any]) -> None:
    from sfi_traces.views.frames import playable

    require("the player needs", "player", "textual")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("play must be in a terminal; sfi trace show --step N prints a step")
    from sfi_cli.commands.trace.replay.player import PlayerApp

    app = PlayerApp(playable(trace, **part))
    app.run()
    if app.failure is not None:
        raise app.failure
    if app.return_code == INTERRUPTED:
        leave_interrupted()
    if app.return_code:
        raise typer.Exit(app.return_code)
