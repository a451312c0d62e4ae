"""Running `sfi` in this process."""

import json
from collections.abc import Callable
from typing import NamedTuple

from typer.testing import CliRunner, Result

from sfi_cli import app as cli
from sfi_core.errors import SfiError


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


def sfi(*arguments: object, text: str = "") -> Ended:
    result = CliRunner().invoke(cli.app, [*map(str, arguments)], input=text)
    if isinstance(result.exception, SfiError):
        return Ended(result.exception.exit_code, result.stdout, f"error: {result.exception}\n")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def raising(*arguments: object) -> Result:
    """Run `sfi` in this process; raise what `main` would turn into a line and an exit code."""
    result = CliRunner().invoke(cli.app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def trace(*arguments: object) -> Ended:
    return sfi("trace", *arguments)


def ways(*command: str) -> tuple[Callable[..., Result], Callable[..., dict], Callable[..., SfiError]]:
    """Three ways to run a command: to its end, to its document, and to an error of one line."""

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(cli.app, [*command, *map(str, arguments)], env={"COLUMNS": "100"})

    def document(*arguments: object) -> dict:
        result = invoke(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def refused(*arguments: object) -> SfiError:
        error = invoke(*arguments).exception
        assert isinstance(error, SfiError), error
        assert "\n" not in str(error)
        return error

    return invoke, document, refused
