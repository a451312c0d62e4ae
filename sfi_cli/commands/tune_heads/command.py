"""`sfi tune heads`: cluster the KV heads of each layer, offline, and write a head file."""

from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_cli.settings.tables import ModelTable
from sfi_core.settings.engine import EngineOptions

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
        o.option(
            TEXTS,
            "Read the model on this text instead; repeat for more.",
            "--prompt-file",
            "-f",
            shown="the bundled document, for the bundled checkpoint",
        ),
    ] = None,
    length: Annotated[
        int, o.option(TEXTS, "Tokens of a text; a longer file is several.", min=2)
    ] = 1000,
    parts: Annotated[
        int | None,
        o.option(
            TEXTS,
            "Disjoint parts of the texts, whose clusters are compared.",
            shown="2, or 1 for a single text",
            min=1,
        ),
    ] = None,
    clusters: Annotated[int, o.option(CLUSTERS, "Clusters of each layer, N_r.", min=1)] = 2,
    top_k: Annotated[
        int | None,
        o.option(
            CLUSTERS,
            "Positions of each head's set, k.",
            shown="64, or what the traces have of them",
            min=1,
        ),
    ] = None,
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    sets: Annotated[list[str] | None, o.sets("tune heads", o.MODEL)] = None,
    output: Annotated[Path, o.option(o.OUTPUT, "Head file.", "--output", "-o")] = OUTPUT,
    plot: Annotated[
        Path | None, o.option(o.OUTPUT, "Draw the similarity of heads to a .png or .svg.")
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
        top=top_k, model=model, engine=settings.table(EngineOptions),
        loading={
            "revision": settings.table(ModelTable).revision, "dtype": dtype, "device": device,
            "trust_remote_code": trust_remote_code,
        },
        output=Output(output, plot=plot, force=force, json=json, quiet=quiet),
    ).run()  # fmt: skip
