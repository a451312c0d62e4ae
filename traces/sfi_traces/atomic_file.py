"""Files that are replaced whole, so that a reader never sees half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """Return the hidden path that a file is written to before it gets its name."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write; rename it to `path` once the block has ended well, else remove it."""
    temporary = temporary_path(path)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file through `atomic_file`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)
