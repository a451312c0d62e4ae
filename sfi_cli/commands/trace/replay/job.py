"""`sfi trace replay` after its options are read."""

import re
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from sfi_cli.commands.trace.replay.grid import ReplayGrid
from sfi_cli.commands.trace.replay.views import replay_text
from sfi_cli.terminal.output import INTERRUPTED, Output, leave_interrupted
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import BackendError, ConfigError

RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The part of a trace to replay: a request, layers, KV heads; None for all."""

    trace: Path
    request: int | None
    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None

    def describe(self, trace: Any, recorded: list[Any]) -> dict[str, Any]:
        """Return the first fields of a document: the part that is replayed."""
        return {
            "trace": str(self.trace),
            "model": trace.manifest["model"]["name"],
            "policy": trace.manifest["policy"],
            "audit_top": recorded[0].top,
            "requests": [
                {"request": one.request, "prompt_tokens": one.prompt_tokens, "steps": one.steps}
                for one in recorded
            ],
            "layers": sorted(set(recorded[0].layer_U.tolist())),
            "heads": len(recorded[0].layer_U),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """The options of a replay.

    Attributes:
        against: Trace of a real run, whose settings are replayed; None for none.
        batch: Requests that share the weights in the byte model.
    """

    choice: Choice
    output: Output
    against: Path | None
    grid: ReplayGrid
    batch: int

    def run(self) -> None:
        """Load the trace, replay the settings, write and show the outcomes."""
        if self.against is not None and (self.grid.given or self.output.plot is not None):
            raise ConfigError(
                "against replays the other trace's setting and must come without others, or a plot"
            )
        with self.output:
            document = self._document()
            self.output.data(document, replay_text)
            if document["rows"]:
                from sfi_traces.replay.plot import write_plot

                self.output.figure(write_plot, document)
        if document["interrupted"]:
            leave_interrupted()

    def _document(self) -> dict[str, Any]:
        from sfi_traces.model.trace import Trace
        from sfi_traces.replay import Setting, Supports, compare

        trace = Trace.open(self.choice.trace)
        real = trace if self.against is None else Trace.open(self.against)
        settings = [] if self.against else self.grid.settings(trace, note=self.output.say)
        recorded = Supports.load(trace, self.choice.request, self.choice.layers, self.choice.heads)
        own = Setting.recorded(trace)
        rows, interrupted = self._rows(recorded, settings, own)
        ran = trace.manifest["policy"] == "sfi" and any(row["recorded"] for row in rows)
        validation = None
        if self.against is not None or ran:
            validation = asdict(compare(recorded, trace, real, batch=self.batch))
        return {
            **self.choice.describe(trace, recorded),
            "batch": self.batch,
            "rows": rows,
            "against": None if self.against is None else str(self.against),
            "validation": validation,
            "interrupted": interrupted,
        }

    def _rows(
        self, recorded: list[Any], settings: list[Any], own: Any
    ) -> tuple[list[dict[str, Any]], bool]:
        # a row for each setting, fastest first, and whether Ctrl-C left settings out
        from sfi_traces.replay import pareto, replay

        found: list[tuple[Any, Any]] = []
        interrupted = False
        try:
            with BenchProgress(quiet=self.output.quiet) as progress:
                for setting in settings:
                    progress.update("replaying settings", len(found), len(settings))
                    found.append((setting, replay(recorded, setting, batch=self.batch)))
        except KeyboardInterrupt:
            interrupted = True
        found.sort(key=lambda pair: (-pair[1].speedup, -pair[1].retained_mass))
        front = pareto([outcome for _, outcome in found])
        rows = [
            {
                **setting.to_dict(),
                "trigger_token_ids": sorted(setting.trigger_token_ids),
                **asdict(outcome),
                "pareto": best,
                "recorded": setting.same_as(own),
            }
            for (setting, outcome), best in zip(found, front, strict=True)
        ]
        return rows, interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayJob:
    """The options of `--play`.

    Attributes:
        choice: The part to show; the first request if `choice.request` is None.
        step: Steps to print, `12` or `12-20`; None to play.
        speed: Steps a second.
    """

    choice: Choice
    output: Output
    step: str | None
    speed: float

    def run(self) -> None:
        """Play the run on a terminal; print the steps if `step` is given or there is no terminal."""
        from sfi_cli.commands.trace.replay.frame_view import plain_frame
        from sfi_traces.model.trace import Trace
        from sfi_traces.replay.playback import Playback

        steps = _steps(self.step)
        watched = steps is None and self.output.path is None
        watched = watched and sys.stdin.isatty() and sys.stdout.isatty()
        if watched:
            check_textual()
        playback = Playback.load(
            Trace.open(self.choice.trace), self.choice.request, self.choice.layers,
            self.choice.heads, audited=not watched,
        )  # fmt: skip
        if steps is not None and steps.start >= playback.steps:
            raise ConfigError(f"step must be one of 0 to {playback.steps - 1}, got {self.step}")
        if watched:
            _watch(playback, self.speed)
            return
        wanted = steps or range(playback.steps)
        with self.output:
            self.output.pieces(plain_frame(playback, t) for t in wanted if t < playback.steps)


def check_textual() -> None:
    """Refuse to play without Textual.

    Raises:
        BackendError: Textual is not installed; the message says how to install it.
    """
    if find_spec("textual") is None:
        raise BackendError(
            "the player needs Textual, which is not installed; pip install 'sfi-toolkit[player]', "
            "or print steps with --step"
        )


def _watch(playback: Any, speed: float) -> None:
    from sfi_cli.commands.trace.replay.player import PlayerApp

    app = PlayerApp(playback, speed, sys.stdout.encoding)
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
