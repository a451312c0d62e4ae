"""`sfi trace replay --play`: a recorded run in the terminal, one step at a time."""

import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sfi_cli.commands.trace.replay.frame_view import plain_frame, screen
from sfi_cli.terminal.output import Output

FASTEST = 64.0
REDRAW = 0.5  # seconds, for a window that was resized
KEYS = {
    "\x1b[C": "next", "\x1b[B": "next", " ": "next", "\r": "next", "\n": "next",
    "\x1b[D": "back", "\x1b[A": "back", "b": "back", "\x7f": "back",
    "n": "next slow", "p": "previous slow", "a": "autoplay", "+": "faster", "=": "faster", "-": "slower",
    "g": "go", "q": "quit", "\x04": "quit", "": "quit",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Player:
    """What the keys do.

    Attributes:
        steps: Steps of the run.
        slow_at: Slow steps of the run.
        speed: Steps a second of autoplay.
        step: The step shown.
        playing: Whether it plays by itself.
        typed: Digits of the step to go to; None unless a number is being typed.
        done: Whether to leave.
    """

    steps: int
    slow_at: Sequence[int]
    speed: float
    step: int = 0
    playing: bool = False
    typed: str | None = None
    done: bool = False

    def press(self, key: str) -> None:
        """Take a key, or an arrow's escape sequence; others do nothing."""
        if self.typed is not None and self._type(key):
            return
        match KEYS.get(key):
            case "autoplay":
                self.playing = not self.playing
            case "faster":
                self.speed = min(FASTEST, self.speed * 2)
            case "slower":
                self.speed = max(1 / FASTEST, self.speed / 2)
            case "go":
                self.typed, self.playing = "", False
            case "quit":
                self.done = True
            case str(move):
                self._move(self._target(move))

    def tick(self) -> None:
        """Play one step; stop at the end."""
        self.step = min(self.step + 1, self.steps - 1)
        self.playing = self.step < self.steps - 1

    def _target(self, move: str) -> int:
        if move == "next slow":
            return next((t for t in self.slow_at if t > self.step), self.step)
        if move == "previous slow":
            return next((t for t in reversed(self.slow_at) if t < self.step), self.step)
        return self.step + (1 if move == "next" else -1)

    def _move(self, step: int) -> None:
        self.step, self.playing = max(0, min(step, self.steps - 1)), False

    def _type(self, key: str) -> bool:
        # digits, then Enter; any other key ends the typing and keeps its own meaning
        assert self.typed is not None, "a number is being typed"
        if key.isdecimal() and key.isascii():
            self.typed += key
            return True
        if key == "\x7f":
            self.typed = self.typed[:-1]
            return True
        typed, self.typed = self.typed, None
        if key in "\r\n" and key:
            self._move(int(typed) if typed else self.step)
            return True
        return False


def play(playback: Any, speed: float) -> bool:
    """Play until the user leaves; return False, and do nothing, without a terminal to do it on."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    from rich.console import Console
    from rich.live import Live

    player = Player(steps=playback.steps, slow_at=playback.slow_at, speed=speed)
    console = Console(file=sys.stdout)
    with (
        keys_at_once(sys.stdin.fileno()) as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not player.done:
            live.update(screen(playback, player, console), refresh=True)
            pressed = keys(1 / player.speed if player.playing else REDRAW)
            for key in pressed:
                player.press(key)
            if player.playing and not pressed:
                player.tick()
    return True


@contextmanager
def keys_at_once(descriptor: int) -> Iterator[Any]:
    """Read keys without Enter and without echo; put the terminal back, whatever happens.

    Yields:
        A function that waits for keys, so many seconds at most, and returns them.
    """
    import termios
    import tty

    before = termios.tcgetattr(descriptor)

    def keys(wait: float) -> list[str]:
        ready, _, _ = select.select([descriptor], [], [], wait)
        return split_keys(os.read(descriptor, 1024)) if ready else []

    try:
        tty.setcbreak(descriptor)
        mode = termios.tcgetattr(descriptor)
        mode[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell with this screen
        termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
        yield keys
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def split_keys(read: bytes) -> list[str]:
    """Split what the terminal sent into keys; the end of the input is an empty one."""
    text = read.decode("ascii", errors="replace")
    if not text:
        return [""]
    keys = []
    while text:
        size = 3 if text.startswith("\x1b[") else 1
        keys.append(text[:size])
        text = text[size:]
    return keys


def print_frames(playback: Any, steps: range, output: Output) -> None:
    """Write steps as plain text, one after the other; those after the last one are not there."""
    frames = (plain_frame(playback, step) for step in steps if step < playback.steps)
    output.pieces(frames)
