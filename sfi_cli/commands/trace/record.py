"""`sfi trace record`: `sfi generate` that writes a trace."""

import inspect
from contextlib import nullcontext
from typing import Annotated, Any, get_type_hints

from sfi_cli import options as o
from sfi_cli.commands.generate import generate
from sfi_cli.commands.trace.report import report_after
from sfi_cli.terminal.output import dated_folder

# options of `sfi generate` that `record` sets itself
ELSEWHERE = ("trace", "output", "resume", "compare")
Folder = Annotated[o.File, o.option(o.TRACE, "Folder of the trace.", "--output", "-o", shown="sfi-trace-DATE-TIME")]
Report = Annotated[
    bool, o.option(o.TRACE, "Write DIR-report.html beside the trace, as sfi trace report does.", "--report")
]


def record(*, output: Folder = None, report: Report = False, **options: Any) -> None:
    """Continue a prompt as `sfi generate` does, and record the positions read and the triggers.

    A trace is a folder of Parquet tables: steps, triggers, selections and lambda*, timings; with --audit N
    also the dense attention of every N-th step. Without a prompt: the bundled example.

    For example:

      sfi trace record -o run

      sfi trace record -f long.txt --model Qwen/Qwen3-0.6B -o run --audit 16

      sfi trace record -o dense --policy full-kv --audit 1

      sfi trace record -o run --audit 1 --report
    """
    folder = output or dated_folder("sfi-trace")
    force, quiet = options["force"], options["quiet"]
    with report_after(folder, force=force, quiet=quiet) if report else nullcontext():
        generate(**options, trace=folder, output=None, compare=False)


def _take_options_of_generate() -> None:
    # give `record` the signature that Typer reads: generate's options but ELSEWHERE, and its own
    hints = get_type_hints(generate, include_extras=True)
    shared = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(generate).parameters.items()
        if name not in ELSEWHERE
    ]
    ours = [p for p in inspect.signature(record).parameters.values() if p.kind is p.KEYWORD_ONLY]
    record.__signature__ = inspect.Signature([*shared, *ours])  # type: ignore[attr-defined]
    record.__annotations__ = {p.name: p.annotation for p in (*shared, *ours)}


_take_options_of_generate()
