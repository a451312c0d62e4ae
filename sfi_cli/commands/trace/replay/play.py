"""`sfi trace replay --play`: plays a run on a terminal, or prints its steps."""

import re
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer

from sfi_cli.commands.trace.replay.frame_view import plain_frame
from sfi_cli.terminal.output import INTERRUPTED, Output, leave_interrupted
from sfi_core.errors import ConfigError, not_installed
from sfi_core.machine.text import printable_lines

if TYPE_CHECKING:  # numpy and Arrow take time
    from sfi_traces.model.request import Request
    from sfi_traces.model.trace import Trace

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
