"""`sfi trace replay`: replay a recorded run under other settings, or watch it step by step."""

import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.commands.trace.replay.frame_view import plain_frame
from sfi_cli.commands.trace.replay.views import replay_text, reuse_text
from sfi_cli.parsing import number_list
from sfi_cli.settings import SETTINGS, settings_for, texts
from sfi_cli.terminal.output import INTERRUPTED, Output, leave_interrupted
from sfi_core.errors import ConfigError, not_installed
from sfi_core.machine.text import printable_lines
from sfi_core.settings.config import TRIGGER_POLICIES

if TYPE_CHECKING:  # numpy and Arrow take time
    from sfi_traces.model.request import Request
    from sfi_traces.model.trace import Trace

SLOW, MEMORY, PLAY = "When a step is slow", "What a fast step reads", "Playing the run"
Values = str | None  # one or more with commas between; None is the trace's own
_slow, _play = partial(o.option, SLOW), partial(o.option, PLAY)
SPEED = 4.0  # steps a second
EVERY = (1, 2, 4, 8, 16)  # intervals that an imported trace is replayed with
SETS = "Another setting: span=0,10. Repeat for more; sfi config list has all settings."


def _grid(name: str, panel: str, **more: Any) -> Any:
    shown = {"help": SETTINGS[name].brief, "show_default": "the trace's own", **more}
    return typer.Option(rich_help_panel=panel, **shown)


def _part(what: str, example: str) -> Any:
    return typer.Option(help=f"Only these {what}: {example}.", show_default="all")


def replay(
    trace: o.TraceDir,
    trigger_policy: Annotated[
        Values, _grid("trigger_policy", SLOW, help=f"{', '.join(TRIGGER_POLICIES)}; or codescan.")
    ] = None,
    triggers: Annotated[o.Words, _slow(o.TRIGGER, "--trigger", shown="the trace's own")] = None,
    trigger_set: Annotated[
        o.Words, _slow("A set of trigger strings, blanks between: NAME='. ? !'. Repeat to compare sets.")
    ] = None,
    t_max: Annotated[Values, _grid("t_max", SLOW)] = None,
    refresh_every: Annotated[
        Values,
        _slow("Reuse each recorded selection for so many steps: 1,2,4,8,16.", shown="off; for an imported trace these"),
    ] = None,
    budget: Annotated[Values, _grid("budget", MEMORY)] = None,
    sets: Annotated[o.Words, o.sets(MEMORY, SETS, "NAME=VALUES")] = None,
    request: o.RequestIndex = None,
    layers: Annotated[str | None, _part("layers", "0,3,8-11")] = None,
    heads: Annotated[str | None, _part("KV heads", "0,2-3")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests that share the weights in the byte model.")] = 1,
    against: Annotated[
        o.File,
        typer.Option(help="Trace of a run of --policy sfi: replay its settings, and compare with what it measured."),
    ] = None,
    play: Annotated[bool, _play("Step through the run.", "--play")] = False,
    step: Annotated[str | None, _play("Print these steps, 12 or 12-20, instead of waiting for keys.")] = None,
    speed: Annotated[float | None, _play("Steps a second of autoplay.", shown=str(SPEED), min=0.1)] = None,
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
    if play:
        if others or json or any((refresh_every, against)):
            raise ConfigError("play shows the run as it was and must come without other settings")
        play_run(Trace.open(trace), part, written, step=step, speed=speed or SPEED)
        return
    _check_unplayed(speed, step)
    opened = Trace.open(trace)
    reuses = refresh_every is not None or opened.imported is not None
    if reuses:
        _check_reuse(axes, against, batch)
    elif against is not None and others:
        raise ConfigError("against replays the other trace's setting and must come without others")
    with written:
        found: list[Any] = []
        if others or not (reuses or against):
            found = replay_settings(opened, axes, triggers, trigger_set, written.say)
        if reuses:
            every = intervals(refresh_every, () if others else EVERY)
            document = reuse_document(opened, part, every, found, quiet=quiet)
        else:
            document = replay_document(
                opened, against, part, found, batch=batch, quiet=quiet, own_budget="budget" not in axes
            )
        written.data(document, reuse_text if reuses else replay_text)
    if document["interrupted"]:
        leave_interrupted()


def _check_unplayed(speed: float | None, step: str | None) -> None:
    if speed is not None:
        raise ConfigError(f"speed must come with --play, got {speed:g}")
    if step is not None:
        raise ConfigError(f"step must come with --play, got {step}")


def _check_reuse(axes: dict[str, str], against: Path | None, batch: int) -> None:
    # selections are reused as they are: neither memory nor bytes are modelled
    from sfi_traces.replay.setting import MEMORY

    if against is not None:
        raise ConfigError(f"against needs a recorded run's memory and bytes, got {against}")
    if batch != 1:
        raise ConfigError(f"batch must come without --refresh-every and an imported trace, got {batch}")
    for name in MEMORY:
        if name in axes:
            raise ConfigError(
                f"{name} must come without --refresh-every and an imported trace: selections are reused as they are"
            )


RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def play_run(trace: "Trace", part: dict[str, Any], output: Output, *, step: str | None, speed: float) -> None:
    """Play a run on a terminal; print the steps if `step`, `12` or `12-20`, is given or there is no terminal.

    `part` has the request, layers and KV heads to show; `speed` is in steps a second.
    """
    from sfi_traces.views.frames import playable

    steps = _steps(step)
    watched = steps is None and output.path is None
    watched = watched and sys.stdin.isatty() and sys.stdout.isatty()
    if watched:
        check_textual()
    request = playable(trace, **part, audited=not watched)
    recorded = range(len(request.steps))
    if steps is not None and steps.start not in recorded:
        raise ConfigError(f"step must be one of 0 to {recorded[-1]}, got {step}")
    if watched:
        _watch(request, speed)
        return
    with output:
        output.pieces(printable_lines(plain_frame(request, at)) for at in steps or recorded if at in recorded)


def check_textual() -> None:
    """Raise `BackendError` if Textual is not installed."""
    if find_spec("textual") is None:
        raise not_installed("the player (--step prints steps without it) needs", "Textual", "player")


def _watch(request: "Request", speed: float) -> None:
    from sfi_cli.commands.trace.replay.player import PlayerApp

    app = PlayerApp(request, speed, sys.stdout.encoding)
    app.run()
    if app.failure is not None:
        raise app.failure
    if app.return_code == INTERRUPTED:
        leave_interrupted()
    if app.return_code:
        raise typer.Exit(app.return_code)


def _steps(text: str | None) -> range | None:
    if text is None:
        return None
    match = RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"step must be a number or a range like 12-20, got {text}")
    first = int(match[1])
    last = int(match[2] or first)
    if last < first:
        raise ConfigError(f"step must be an ascending range, got {text}")
    return range(first, last + 1)
