"""Data that comes as pieces of text, too much to hold at once."""

from collections.abc import Iterable
from pathlib import Path

from sfi_cli.terminal.file_output import FileOutput
from sfi_cli.terminal.output import Output


def write_pieces(pieces: Iterable[str], path: Path | None, *, force: bool) -> None:
    """Write text to stdout as it comes, or to a file that is there when it is complete.

    Raises:
        ConfigError: The file exists and `force` is off; no piece was asked for then.
        SfiError: It cannot be written.
    """
    if path is None:
        shown = Output(None, force=False)
        for piece in pieces:
            shown.stream(piece)
        return
    file = FileOutput(path, force=force)
    try:
        save_pieces(file, pieces)
    finally:
        file.discard()


def save_pieces(file: FileOutput, pieces: Iterable[str]) -> None:
    """Write text to a file that is there when it is complete."""

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as temporary:
            temporary.writelines(pieces)

    file.save(write)
