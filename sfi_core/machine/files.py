"""Files that are replaced whole, and folders that one process writes."""

import errno
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sfi_core.errors import ConfigError, SfiError

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"  # an empty file, there while a process writes the folder
MOST_BYTES = 1 << 28  # of a file that is read whole
KEPT = 40  # characters of a file's name in its temporary file's: a name has at most 255 bytes


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn an `OSError` of the block into the `SfiError` that `what` cannot be written."""
    try:
        yield
    except OSError as error:
        raise SfiError(f"{what} cannot be written: {error.strerror}") from error


def new_file(path: Path) -> Path:
    """Make a hidden, empty file beside `path`, which nobody else has and which is no link; return its path."""
    temporary = path.with_name(f".{path.name[:KEPT]}.{secrets.token_hex(4)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return temporary


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file; rename it to `path`, be that a link, once the block has ended well, else remove it."""
    temporary = new_file(path)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error counts
            temporary.unlink()
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file through `atomic_file`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


class FolderLock:
    """Keeps other writers out of a folder until `release`, or the end of the process."""

    def __init__(self, folder: Path, what: str) -> None:
        """Lock a folder, which errors call `what`; raise `ConfigError` where another writer has it."""
        self._path, self._file = folder / LOCK, -1
        while self._file < 0 and sys.platform != "win32":
            self._file = _locked(self._path, f"{what} {folder}")

    def __del__(self) -> None:
        """Let others in where nobody holds the lock any more."""
        self.release()

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if self._file >= 0:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._file = -1


def is_locked(folder: Path) -> bool:
    """Say whether another writer has a folder's `FolderLock`; makes no file."""
    if sys.platform == "win32":
        return False
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(file)
    return False


def _locked(path: Path, what: str) -> int:
    # the locked file, or -1 where its last owner removes it at this moment
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        with suppress(FileNotFoundError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), path.lstat()):
                return file
    except BlockingIOError as error:
        os.close(file)
        raise ConfigError(f"{what} must be free, got another process on it") from error
    except OSError:
        return file  # a file system without locks
    os.close(file)
    return -1


def read_text(path: Path) -> str:
    """Read a text of UTF-8, without the byte order mark that some editors begin it with."""
    return path.read_text(encoding="utf-8-sig")


def read_file(path: Path) -> bytes:
    """Read a regular file of at most `MOST_BYTES`; raise OSError for another: a FIFO has no end."""
    size, regular = path.stat().st_size, path.is_file()
    if not regular or size > MOST_BYTES:
        what = f"{size:,} bytes" if regular else "no regular file"
        raise OSError(errno.EINVAL, f"it must be a file of at most {MOST_BYTES:,} bytes, got {what}", str(path))
    return path.read_bytes()
