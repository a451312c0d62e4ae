"""The file of a study: SQLite or a journal, by its suffix, and one-line errors for what can go wrong."""

import json
import logging
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sfi_core.errors import BackendError, ConfigError, InputError, SfiError

DATABASES, JOURNALS = (".db", ".sqlite", ".sqlite3"), (".journal", ".log")
PATIENCE = 30.0  # seconds that a database may be busy with other workers


def check_optuna() -> None:
    """Refuse to search where a package of the extra is missing.

    Raises:
        BackendError: Naming what to install.
    """
    for package in ("optuna", "scipy"):
        if find_spec(package) is None:
            raise BackendError(
                f"tuning needs {package}, which is not installed; pip install 'sfi-toolkit[tune]'"
            )


def check_path(path: Path, *, resume: bool) -> None:
    """Refuse a study's file before any work.

    Raises:
        ConfigError: Another suffix, or a file that is there without `resume`.
    """
    known = (*DATABASES, *JOURNALS)
    if path.suffix not in known:
        raise ConfigError(f"study must end in one of {known}, got {path.name}")
    if path.exists() and not resume:
        raise ConfigError(f"study {path} exists; remove it, or add --resume to go on with it")


@contextmanager
def careful(path: Path) -> Iterator[None]:
    """Keep Optuna's own lines and warnings off the terminal, and turn a storage's errors into ours.

    Raises:
        InputError: The file is damaged.
        SfiError: It is locked or cannot be written.
    """
    import optuna  # noqa: PLC0415 - an extra
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - comes with Optuna

    optuna.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        raise _unusable(path, str(error.__cause__ or error)) from error
    except OSError as error:
        raise SfiError(f"study {path} cannot be written: {error.strerror}") from error


def open_storage(path: Path) -> Any:
    """Open a study's file for Optuna, or make it; inside `careful`.

    Raises:
        InputError: The file is damaged, or something else.
        SfiError: It is locked.
    """
    return _journal(path) if path.suffix in JOURNALS else _database(path)


def _unusable(path: Path, reason: str) -> SfiError:
    if "locked" in reason:
        return SfiError(f"study {path} is locked by another process; try again when it is free")
    return InputError(f"study {path} cannot be used: {reason.strip().partition(chr(10))[0]}")


def _journal(path: Path) -> Any:
    from optuna.storages import JournalStorage  # noqa: PLC0415 - an extra
    from optuna.storages.journal import JournalFileBackend  # noqa: PLC0415

    try:
        if path.exists():
            with path.open(encoding="utf-8") as file:
                json.loads(file.readline() or '{"op_code": 0}')["op_code"]
        return JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"study {path} is damaged, or no journal of Optuna's") from error


def _database(path: Path) -> Any:
    from optuna.storages import RDBStorage  # noqa: PLC0415 - an extra
    from optuna.storages.journal import JournalFileOpenLock  # noqa: PLC0415
    from sqlalchemy import URL  # noqa: PLC0415 - comes with Optuna

    url = URL.create("sqlite", database=str(path)).render_as_string()
    lock = JournalFileOpenLock(str(path))
    lock.acquire()  # two workers that begin at once would both make the tables
    try:
        if path.exists():
            _check_database(path)
        return RDBStorage(url, engine_kwargs={"connect_args": {"timeout": PATIENCE}})
    except RuntimeError as error:
        raise _unusable(path, str(error)) from error  # another version's tables
    finally:
        lock.release()


def _check_database(path: Path) -> None:
    # Optuna would put its tables into any database
    try:
        with closing(sqlite3.connect(path, timeout=PATIENCE)) as connection:
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {row[0] for row in rows}
    except sqlite3.DatabaseError as error:
        raise _unusable(path, str(error)) from error
    if tables and "studies" not in tables:
        raise InputError(f"study {path} is a database of something else")
