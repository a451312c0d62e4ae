"""Screens as text: of a Textual app, and of a command on a pseudo-terminal."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from xml.etree import ElementTree as ET

import pytest

from sfi_cli.app import main

CELL = 12.2  # width of a column in Rich's SVG
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[=>()].?|[\r\n\b]|[^\x1b\r\n\b]+")


def screen(app) -> list[str]:
    """Return the lines of the screen, without blanks at their ends; not its colors and ids, which change."""
    svg = ET.fromstring(app.export_screenshot(simplify=True))  # noqa: S314 - our own
    width, height = app.size
    cells = [[" "] * width for _ in range(height)]
    for text in svg.iter("{http://www.w3.org/2000/svg}text"):
        clip = re.search(r"-line-(\d+)\)", text.get("clip-path", ""))
        if clip is None:
            continue  # the title
        column = round(float(text.get("x")) / CELL)
        for at, character in enumerate(text.text or "", column):
            if at < width:
                cells[int(clip[1])][at] = character.replace("\u00a0", " ")
    return ["".join(row).rstrip() for row in cells]


def drawn(shown: str, width: int) -> list[str]:
    """Return the lines that a terminal has after what was written to it, those scrolled away included."""
    lines, row, column = [[" "] * width], 0, 0
    for match in CONTROL.finditer(shown):
        text, (number, kind) = match[0], match.groups()
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
        elif text == "\b":
            column = max(0, column - 1)
        elif kind == "A":
            row = max(0, row - int(number or 1))
        elif kind == "K":
            first = 0 if number == "2" else min(column, width)
            lines[row][first:] = [" "] * (width - first)
        elif kind is None and text[0] != "\x1b":
            for character in text:
                if column == width:
                    row, column = row + 1, 0
                lines += [[" "] * width for _ in range(row + 1 - len(lines))]
                lines[row][column] = character
                column += 1
        lines += [[" "] * width for _ in range(row + 1 - len(lines))]
    return ["".join(line).rstrip() for line in lines]


def on_a_terminal(width: int, *arguments: object) -> tuple[int, list[str], str]:
    """Run `sfi` in this process; return its exit code, the lines of its screen, and what it wrote."""
    shown = io.StringIO(newline="\r\n")
    shown.isatty = lambda: True
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("stdout", shown), ("stderr", shown), ("argv", ["sfi", *map(str, arguments)])):
            patch.setattr(sys, name, value)
        for name, value in (("COLUMNS", str(width)), ("TERM", "xterm-256color")):
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code or 0, drawn(shown.getvalue(), width), shown.getvalue()


class Terminal:
    """A command on a pseudo-terminal of its own; `shown` is what it has written."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        variables = {name: value for name, value in environment.items() if name != "COLUMNS"}
        self.process = subprocess.Popen(
            words,
            stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True,
            env={**variables, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip
        self.shown = ""

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def wait_for(self, text: str) -> None:
        """Read what is drawn until a text comes, and forget what came before it."""
        limit = time.monotonic() + 60
        while text not in self.shown:
            left = limit - time.monotonic()
            assert left > 0, f"no {text!r} in {self.shown[-2000:]!r}"
            if select.select([self.master], [], [], left)[0]:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]
