"""A file that is not text, written like all output: checked first, a temporary name, then the real one."""

import os
from collections.abc import Callable
from pathlib import Path

from sfi_cli.terminal.output import Output
from sfi_core.errors import SfiError


class FileOutput(Output):
    """One more file of a command, beside its data."""

    def __init__(self, path: Path, *, force: bool, quiet: bool = False) -> None:
        """Check the path before the work starts; see `Output`."""
        super().__init__(path, force=force, quiet=quiet)
        self.path = path

    def save(self, write: Callable[[Path], None]) -> None:
        """Let `write` fill the temporary file, then give it its name.

        Raises:
            SfiError: The disk is full, say.
        """
        try:
            write(self._temporary)
            with self._temporary.open("rb") as file:
                os.fsync(file.fileno())
            self._temporary.replace(self.path)
        except OSError as error:
            raise SfiError(f"output {self.path} cannot be written: {error.strerror}") from error
        self._written()
