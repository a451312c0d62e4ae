"""A study's file, an Optuna journal, with one-line errors."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sfi_core.errors import BackendError, ConfigError, InputError, SfiError

SUFFIX = ".journal"


def check_optuna() -> None:
    """Raise `BackendError` if a package of the extra is missing."""
    for package in ("optuna", "scipy"):
        if find_spec(package) is None:
            raise BackendError(
                f"tuning needs {package}, which is not installed; pip install 'sfi-toolkit[tune]'"
            )


def check_path(path: Path, *, resume: bool) -> None:
    """Raise `ConfigError` for another suffix, or for a file that exists without `resume`."""
    if path.suffix != SUFFIX:
        raise ConfigError(f"study must end in {SUFFIX}, got {path.name}")
    if path.exists() and not resume:
        raise ConfigError(f"study {path} exists; remove it, or add --resume to go on with it")


@contextmanager
def careful(path: Path) -> Iterator[None]:
    """Silence Optuna's messages, and raise `SfiError` if the file cannot be written."""
    import optuna  # noqa: PLC0415 - an extra

    optuna.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    except OSError as error:
        raise SfiError(f"study {path} cannot be written: {error.strerror}") from error


def open_storage(path: Path) -> Any:
    """Open or make a study's file; call it inside `careful`.

    Raises:
        InputError: The file is damaged or something else.
    """
    from optuna.storages import JournalStorage  # noqa: PLC0415 - an extra
    from optuna.storages.journal import JournalFileBackend  # noqa: PLC0415

    try:
        if path.exists():
            with path.open(encoding="utf-8") as file:
                json.loads(file.readline() or '{"op_code": 0}')["op_code"]
        return JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"study {path} is damaged, or no journal of Optuna's") from error
