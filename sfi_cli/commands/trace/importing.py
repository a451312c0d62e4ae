"""`sfi trace import`: make a trace of another program's selections."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.terminal.output import Output, dated_folder
from sfi_traces.views.table import plural

_of = partial(o.option, "Options")


def import_(
    file: Annotated[Path, typer.Argument(help=".npz or .pt.", metavar="FILE")],
    output: Annotated[o.File, o.output("Folder of the trace.", shown="sfi-trace-DATE-TIME")] = None,
    top: Annotated[o.Number, _of("Only the most probable positions of each row.", shown="1024", min=1)] = None,
    tokenizer: Annotated[o.Text, _of("Hub id or folder: the tokens' text, and which end a sentence.")] = None,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    r"""Make a trace of another program's selections at each step, or of transformers' attention.

    docs/import.md describes the file: positions or blocks of an indexer (DeepSeek's, MiniMax's) by step,
    layer and head; or attention probabilities. show, plot, report, sql, diff, check and replay read a trace.
    How rarely would the indexer have to run? sfi trace replay DIR --refresh-every 1,2,4,8,16

    For example:

      sfi trace import indexer.npz -o run --tokenizer deepseek-ai/DeepSeek-V3.2-Exp

      sfi trace import attention.pt -o run --top 256
    """
    from sfi_cli.terminal.progress import Progress
    from sfi_core.models.load import load_tokenizer
    from sfi_traces.importing import import_trace

    folder = output or dated_folder("sfi-trace")
    with Progress(quiet=quiet) as progress:
        manifest = import_trace(
            file,
            folder,
            top=top,
            tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
            force=force,
            progress=lambda done, total: progress.update("importing", done, total),
        )
    names = ("imported", "model", "audit", "prompts", "tables", "trigger_token_ids")
    document = {"trace": str(folder), **{name: manifest[name] for name in names}}
    if json:
        Output().document(document)
    else:
        Output(quiet=quiet).say(import_text(document))


def import_text(document: dict[str, Any]) -> str:
    """Say what the trace holds, and what the file lacks."""
    imported, rows = document["imported"], document["tables"]
    what = f"{imported['kind']} of {imported['file']}"
    if imported["block_size"]:
        what += f", blocks of {imported['block_size']} positions"
    layers = document["model"]["layers"]
    heads = max(layer["heads"] for layer in layers)
    sizes = (
        f"{plural(len(document['prompts']), 'request')}, {plural(rows['steps'], 'step')}, "
        f"{plural(len(layers), 'layer')} of {plural(heads, 'head')}, up to {document['audit']['top']:,} positions a row"
    )
    lines = [f"{what}: {sizes}"]
    if not imported["masses"]:
        lines.append("note: the file has no masses, so overlaps are known and retained mass is not")
    if not document["trigger_token_ids"]:
        lines.append("note: no token ends a sentence; give --tokenizer, or trigger_token_ids in the file")
    return "\n".join([*lines, f"trace: {document['trace']}"])
