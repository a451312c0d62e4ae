"""Locks of a results folder that several processes share; every lock ends with its process.

They are POSIX record locks on single bytes of one empty file: a process that is killed loses its locks, and a
file system shared between machines has them too. Windows has none: there one process may use a folder.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"
WRITING, PRESENT, FIRST = 0, 1, 2  # bytes: for who writes, for who takes part, of the first claim


class FolderLock:
    """The locks that this process has in a folder.

    A process must have one object for a folder: closing any file of the path drops all locks of the process.
    """

    def __init__(self, folder: Path) -> None:
        """Open the lock file; a folder that cannot be written needs no locks."""
        try:
            self._file: int | None = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            self._file = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep other processes from writing, and from reading what is half written."""
        self._lock(WRITING, wait=True)
        try:
            yield
        finally:
            self.unlock(WRITING)

    def join(self) -> None:
        """Take part in the folder's evaluation until the process ends or `close` is called."""
        self._lock(PRESENT, shared=True, wait=True)

    def alone(self) -> bool:
        """Say whether no other process takes part; for a process that does not take part itself."""
        found = self._lock(PRESENT)
        self.unlock(PRESENT)
        return found

    def take(self, claim: int) -> bool:
        """Claim a number from 0 on; False where another process has the claim."""
        return self._lock(FIRST + claim)

    def give_back(self, claim: int) -> None:
        """Give a claim up."""
        self.unlock(FIRST + claim)

    def close(self) -> None:
        """Give everything up."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def unlock(self, byte: int) -> None:
        """Give a byte's lock up."""
        if sys.platform != "win32" and self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    def _lock(self, byte: int, *, shared: bool = False, wait: bool = False) -> bool:
        if sys.platform == "win32" or self._file is None:
            return True
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.lockf(self._file, how if wait else how | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True
