"""Where a command's words go: data to stdout or a file, everything else to stderr."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer

from sfi_core.distributed import torchrun
from sfi_core.errors import ConfigError, SfiError


def message(text: str) -> None:
    """Print a line for a person, on stderr."""
    typer.echo(text, err=True)


class Output:
    """The data of one command.

    Written to stdout, or with a path to a temporary file that takes the path's name when it is complete.
    """

    def __init__(self, path: Path | None, *, force: bool, quiet: bool = False) -> None:
        """Check the path before the work starts; `quiet` says nothing of what was written.

        Raises:
            ConfigError: The file exists and `force` is off.
            SfiError: The file cannot be written.
        """
        self._path, self._quiet = path, quiet
        if path is None:
            return
        if path.exists() and not force:
            raise ConfigError(f"output {path} exists; add --force to overwrite it")
        if not torchrun.first():
            self._path = None  # one process of several writes
            return
        self._temporary = path.with_name(f".{path.name}.tmp")
        try:
            self._temporary.write_text("")
        except OSError as error:
            raise SfiError(f"output {path} cannot be written: {error.strerror}") from error

    @property
    def streams(self) -> bool:
        """Whether text shows as it comes."""
        return self._path is None

    def stream(self, text: str) -> None:
        """Show a piece of text at once.

        Raises:
            SfiError: The disk behind stdout is full, say.
            BrokenPipeError: Nobody reads any more.
        """
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            # what is still in the buffer would fail again when Python exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            raise SfiError(f"output stdout cannot be written: {error.strerror}") from error

    def document(self, data: dict[str, Any]) -> None:
        """Write one JSON document."""
        self.text(json.dumps(data, ensure_ascii=False, indent=2) + "\n")

    def text(self, text: str) -> None:
        """Write the command's data.

        Raises:
            SfiError: The disk is full, say.
        """
        if self._path is None:
            self.stream(text)
            return
        try:
            with self._temporary.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            self._temporary.replace(self._path)
        except OSError as error:
            raise SfiError(f"output {self._path} cannot be written: {error.strerror}") from error
        self._written()

    def _written(self) -> None:
        if not self._quiet:
            message(f"Wrote {self._path}")

    def discard(self) -> None:
        """Remove the temporary file of a command that failed."""
        if self._path is not None:
            self._temporary.unlink(missing_ok=True)
