"""Running `sfi trace ...` in this process."""

from typing import NamedTuple

from typer.testing import CliRunner

from sfi_cli import app as cli
from sfi_core.errors import SfiError


class Ended(NamedTuple):
    """How a command ended, with an error as `main` shows it."""

    code: int
    stdout: str
    stderr: str


def trace(*arguments: object) -> Ended:
    """Run `sfi trace` with arguments."""
    result = CliRunner().invoke(cli.app, ["trace", *map(str, arguments)])
    if isinstance(result.exception, SfiError):
        return Ended(result.exception.exit_code, result.stdout, f"error: {result.exception}\n")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)
