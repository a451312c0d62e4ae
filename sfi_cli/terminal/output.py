"""Output of a command: data to stdout or a file, a figure to its file, everything else to stderr."""

import codecs
import gzip
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, Self, TextIO

import typer

from sfi_cli.terminal.tables import Part, rendered, wrapped
from sfi_core import distributed as torchrun
from sfi_core.errors import ConfigError, SfiError
from sfi_core.machine.files import atomic_file, new_file, writing
from sfi_core.machine.text import printable_lines, write_json

INTERRUPTED = 130
Document = dict[str, Any]
View = Callable[[Document], Iterable[Part]]


def message(text: str) -> None:
    """Print a line for a person, on stderr; above the bar if there is one, which rich takes care of."""
    sys.stderr.write(f"{printable_lines(text)}\n")
    sys.stderr.flush()


def escape_unknown_characters() -> None:
    r"""Let stdout write a character that its encoding lacks as JSON does, as `\\u2764`."""

    def escaped(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
        return re.sub("(....)", r"\\u\1", units), error.end

    codecs.register_error("sfi.escape", escaped)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="sfi.escape")


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that a stream goes to; None for a pipe or a file."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def leave_interrupted(text: str = "interrupted") -> NoReturn:
    """End a command after Ctrl-C with exit code 130."""
    message(text)
    raise typer.Exit(INTERRUPTED)


def dated_folder(name: str) -> Path:
    """Name a folder of results after the time."""
    return Path(f"{name}-{datetime.now(UTC).astimezone():%Y%m%d-%H%M%S}")


@dataclass(eq=False)
class Output:
    """All that a command writes: its data, a figure, and lines for a person; `with` checks the files first."""

    path: Path | None = None  # None is stdout
    _: KW_ONLY
    suffix: str = ""  # that the data's file must have
    plot: Path | None = None  # None is no figure
    json: bool = False
    force: bool = False
    append: bool = False  # lets `line` go on with a file
    quiet: bool = False  # lets `say` write nothing
    wide: bool = False  # shows all columns on any terminal
    _within_line: bool = field(default=False, init=False)  # on stdout

    def __enter__(self) -> Self:
        """Check the files; raise `ConfigError`, `SfiError`, or `BackendError` for a figure without matplotlib."""
        if self.path is not None and not self.path.name.endswith(self.suffix):
            raise ConfigError(f"output must end in {self.suffix}, got {self.path.name}")
        if self.plot is not None:
            from sfi_traces.figures import check_plot

            check_plot(self.plot)
        for path in filter(None, (self.path, self.plot)):
            with writing(f"output {path}"):
                self._check(path)
        if not torchrun.first():  # another rank writes
            self.path = self.plot = None
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: a file is whole, or not there."""

    def _check(self, path: Path) -> None:
        if _is_stream(path):
            return
        if path.is_symlink() or (path.exists() and not path.is_file()):
            kind = "a link; name the file itself" if path.is_symlink() else "a folder or a device"
            raise ConfigError(f"output {path} must be a file, got {kind}")
        if path.exists() and not (self.force or self.append):
            raise ConfigError(f"output {path} exists; add --force to overwrite it")
        if torchrun.first():
            new_file(path).unlink()

    def stream(self, text: str) -> None:
        """Write to stdout at once; raise `SfiError` for a full disk, BrokenPipeError if a pipe's reader ended."""
        self._within_line = not text.endswith("\n") if text else self._within_line
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            # Python flushes the buffer at exit: without this it would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            raise SfiError(f"output stdout cannot be written: {error.strerror}") from error

    def end_line(self) -> None:
        """End a line of stdout that a stream has begun: a bar or a message would be drawn over it."""
        if self._within_line:
            self.stream("\n")

    def show(self, document: Document, view: View) -> None:
        """Write to stdout the document as JSON, or what `view` makes of it as text of the terminal's width."""
        self.stream(self._text_of(document, view, None if self.wide else terminal_width(sys.stdout)))

    def data(self, document: Document, view: View) -> None:
        """Write to the file, or show on stdout, the document as JSON or as text."""
        if self.path is None:
            self.show(document, view)
        else:
            self.pieces([self._text_of(document, view)])

    def _text_of(self, document: Document, view: View, width: int | None = None) -> str:
        return _json(document) if self.json else printable_lines(rendered(view(document), width))

    def document(self, data: Document) -> None:
        """Write one JSON document to the file or stdout."""
        self.text(_json(data))

    def text(self, text: str) -> None:
        """Write text to the file or stdout."""
        if self.path is None:
            self.stream(text)
        else:
            self.pieces([text])

    def pieces(self, pieces: Iterable[str], files: ExitStack | None = None) -> None:
        """Write pieces to stdout, on a terminal what prints of them, or to the file, compressed if a .gz.

        With `files` all of a command's files get their names together, when it closes.
        """
        if self.path is None:
            for piece in pieces:
                self.stream(printable_lines(piece) if sys.stdout.isatty() else piece)
            return

        packed = self.path.suffix == ".gz"

        def write(path: Path) -> None:
            with path.open("wb") as file:
                # without a name and a time, so that equal texts make equal files
                content = gzip.GzipFile("", "wb", 6, file, mtime=0) if packed else file
                with TextIOWrapper(content, encoding="utf-8") as text:
                    text.writelines(pieces)

        self._save(self.path, write, files)

    def begin_lines(self) -> None:
        """Make the file empty for `line`; with `append` only a torn last line is cut off."""
        if self.path is None or _is_stream(self.path):
            return
        with writing(f"output {self.path}"), self.path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1 if self.append else 0)

    def line(self, document: Document) -> None:
        """Add a document to the file at once, as a line of JSON."""
        if self.path is not None:
            with writing(f"output {self.path}"), self.path.open("ab") as file:
                file.write(f"{write_json(document)}\n".encode())

    def file(self, document: Document) -> None:
        """Write one JSON document to the file, if there is one."""
        if self.path is not None:
            self.document(document)

    def figure(self, draw: Callable[..., None], what: Any) -> None:
        """Call `draw(what, path, kind=...)` for the figure's file, if there is one."""
        if self.plot is not None:
            kind = self.plot.suffix.removeprefix(".")
            self._save(self.plot, lambda path: draw(what, path, kind=kind))

    def _save(self, path: Path, write: Callable[[Path], None], files: ExitStack | None = None) -> None:
        with ExitStack() as alone:
            open_files = alone if files is None else files
            open_files.enter_context(writing(f"output {path}"))
            file = open_files.enter_context(nullcontext(path) if _is_stream(path) else atomic_file(path))
            with writing(f"output {path}"):
                write(file)
        if files is None:
            self.say(f"Wrote {path}")

    def say(self, text: str, indent: int = 0) -> None:
        """Print a line for a person, unless `quiet`; on a terminal, what goes on below begins with `indent` blanks."""
        if not self.quiet:
            if sys.stdout.isatty():
                self.end_line()
            message("\n".join(wrapped(text, terminal_width(sys.stderr), " " * indent)))


def _is_stream(path: Path) -> bool:
    return path.is_char_device() or path.is_fifo()


def _json(data: Document) -> str:
    return write_json(data, indent=2) + "\n"
