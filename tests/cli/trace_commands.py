"""Running `sfi` in this process."""

from typing import NamedTuple

from typer.testing import CliRunner

from sfi_cli import app as cli
from sfi_core.errors import SfiError


class Ended(NamedTuple):
    """How a command ended, with an error as `main` shows it."""

    code: int
    stdout: str
    stderr: str


def sfi(*arguments: object, text: str = "") -> Ended:
    """Run `sfi` in this process, which has torch loaded, with arguments."""
    result = CliRunner().invoke(cli.app, [*map(str, arguments)], input=text)
    if isinstance(result.exception, SfiError):
        return Ended(result.exception.exit_code, result.stdout, f"error: {result.exception}\n")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def trace(*arguments: object) -> Ended:
    """Run `sfi trace` with arguments."""
    return sfi("trace", *arguments)
