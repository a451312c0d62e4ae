"""Errors that a user can fix. Any other exception is a bug and keeps its traceback."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path


class SfiError(Exception):
    """Base class; the CLI prints the message on one line and exits with `exit_code`."""

    exit_code = 1


class ConfigError(SfiError, ValueError):
    """A setting is out of range or contradicts another setting."""

    exit_code = 2


class InputError(SfiError):
    """A file, a model folder or a prompt cannot be read."""

    exit_code = 3


class TraceError(InputError):
    """A trace is missing, damaged or of another schema version."""


class BackendError(SfiError):
    """This machine cannot run what was asked for."""

    exit_code = 4


class UnsupportedModelError(BackendError):
    """The model's architecture cannot run under SFI; the message says why."""


class MemoryForecastError(BackendError):
    """The run would need more memory than is free."""


class NumericsError(SfiError):
    """The model produced NaN or infinite logits, or PyTorch's attention did of a prompt."""


class RankLostError(SfiError):
    """Another process of a tensor-parallel run has died or does not answer."""


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error of a name that is not among those known; it says which is nearest."""
    names = tuple(known)
    near = "".join(f"did you mean {nearest!r}? " for nearest in get_close_matches(name, names, 1))
    return ConfigError(f"unknown {what} {name!r}; {near}expected one of {names}")


def not_installed(what: str, package: str, extra: str) -> BackendError:
    """Return the error of what ("the report needs") lacks a package, and the command that installs our extra for it."""
    clone = Path(__file__).parents[1]  # sfi is on no package index
    place, where = (clone, "") if (clone / "pyproject.toml").is_file() else (".", ", in a clone of sfi")
    return BackendError(f"{what} {package}, which is not installed; pip install -e '{place}[{extra}]'{where}")


def require(what: str, extra: str, *packages: str) -> None:
    """Raise the error of the first package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise not_installed(what, package, extra)
