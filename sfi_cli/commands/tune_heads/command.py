"""`sfi tune heads`: cluster the KV heads of each layer, offline, and write a head file."""

from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_cli.settings.tables import EngineTable, ModelTable

TEXTS, CLUSTERS = "Texts", "Clusters"
OUTPUT = Path("heads.json")


def heads(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Traces of --audit, of one model.", metavar="DIR...", show_default=False
        ),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompt-file",
            "-f",
            help="Read the model on this text instead; repeat for more.",
            show_default="the bundled document, for the bundled checkpoint",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    length: Annotated[
        int,
        typer.Option(
            help="Tokens of a text; a longer file is several.", min=2, rich_help_panel=TEXTS
        ),
    ] = 1000,
    parts: Annotated[
        int | None,
        typer.Option(
            help="Disjoint parts of the texts, whose clusters are compared.",
            min=1,
            show_default="2, or 1 for a single text",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    clusters: Annotated[
        int, typer.Option(help="Clusters of each layer, N_r.", min=1, rich_help_panel=CLUSTERS)
    ] = 2,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Positions of each head's set, k.",
            min=1,
            show_default="64, or what the traces have of them",
            rich_help_panel=CLUSTERS,
        ),
    ] = None,
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    sets: Annotated[list[str] | None, o.sets("tune heads", o.MODEL)] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Head file.", rich_help_panel=o.OUTPUT)
    ] = OUTPUT,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the similarity of heads to a .png or .svg.", rich_help_panel=o.OUTPUT
        ),
    ] = None,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Cluster the KV heads of each layer by what they attend to; choose a head for each cluster (SyncKV).

    The similarity of two heads is the overlap of their top-k sets, on average over steps and texts. The texts
    come from traces, which need no model, or from files that the model reads. With traces, --model only names
    the checkpoint in the head file.

    For example:

      sfi tune heads -f a.txt -f b.txt --model my-model --parts 2 --plot heads.png

      sfi tune heads dense --clusters 1 -o heads.json
    """
    from sfi_cli.commands.tune_heads.job import HeadsJob
    from sfi_cli.settings.given import given
    from sfi_cli.terminal.output import Output

    settings = given("tune heads", sets=sets)
    HeadsJob(
        traces=traces or [], files=prompt_file or [], length=length, parts=parts, clusters=clusters,
        top=top_k, model=model, engine=settings.table(EngineTable),
        loading={
            "revision": settings.table(ModelTable).revision, "dtype": dtype, "device": device,
            "trust_remote_code": trust_remote_code,
        },
        output=Output(output, plot=plot, force=force, json=json, quiet=quiet),
    ).run()  # fmt: skip
