"""A file that is there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """Name the temporary file of a path; its name starts with a dot."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a file its name when it is whole.

    Yields:
        The temporary path to write. A body that fails leaves the old file, and no temporary one.

    Raises:
        OSError: The disk is full, say.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all.

    Raises:
        OSError: The disk is full, say; the old file stays.
    """
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)
