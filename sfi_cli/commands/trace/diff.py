"""`sfi trace diff`: compare two traces."""

from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o


def diff(
    first: Annotated[Path, typer.Argument(help="Folder of the first trace.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Folder of the second trace.", metavar="B")],
    request: o.RequestIndex = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT",
            help="Exit with 1 if this holds: overlap<0.9, first_difference<100, speed<0.8. "
            "Repeat for more; docs/traces.md has the names.",
        ),
    ] = None,
    report: Annotated[
        Path | None, o.option(o.OUTPUT, "Write both beside each other as one HTML file.")
    ] = None,
    json: o.Json = False,
    output: o.OutputPath = None,
    force: o.Force = False,
) -> None:
    """Compare two runs of one model on the same prompts: tokens, layers, slow steps, supports, speed.

    For example:

      sfi trace diff dense run

      sfi trace diff run other --request 0 --json

      sfi trace diff run other --report diff.html

      sfi trace diff released candidate --fail-if 'equal_share<1' --fail-if 'speed<0.8'
    """
    from sfi_cli.commands.trace.diff_job import DiffJob

    DiffJob(
        first=first, second=second, request=request, limits=tuple(fail_if or ()), report=report,
        output=output, json=json, force=force,
    ).run()  # fmt: skip
