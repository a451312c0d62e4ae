"""`sfi trace record`: `sfi generate` that writes a trace."""

import inspect
from typing import Annotated, Any, get_type_hints

from sfi_cli import options as o
from sfi_cli.commands.generate import generate
from sfi_cli.terminal.output import dated_folder

# options of `sfi generate` that `record` sets itself
ELSEWHERE = ("trace", "output", "resume", "compare")
Folder = Annotated[o.File, o.option(o.TRACE, "Folder of the trace.", "--output", "-o", shown="sfi-trace-DATE-TIME")]


def record(*, output: Folder = None, **options: Any) -> None:
    """Continue a prompt as `sfi generate` does, and record the positions read and the triggers.

    A trace is a folder of Parquet tables: steps, triggers, selections and lambda*, timings; with --audit N
    also the dense attention of every N-th step. Without a prompt: the bundled example.

    For example:

      sfi trace record -o run

      sfi trace record -f long.txt --model Qwen/Qwen3-0.6B -o run --audit 16

      sfi trace record -o dense --policy full-kv --audit 1
    """
    generate(**options, trace=output or dated_folder("sfi-trace"), output=None, compare=False)


def _take_options_of_generate() -> None:
    # give `record` the signature that Typer reads: generate's options but ELSEWHERE, and its own
    hints = get_type_hints(generate, include_extras=True)
    shared = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(generate).parameters.items()
        if name not in ELSEWHERE
    ]
    ours = [inspect.signature(record).parameters["output"]]
    record.__signature__ = inspect.Signature([*shared, *ours])  # type: ignore[attr-defined]
    record.__annotations__ = {p.name: p.annotation for p in (*shared, *ours)}


_take_options_of_generate()
