"""`sfi eval`: what a method costs in quality."""

from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_cli.commands.evaluate import request

WHAT, HOW, TEXT = "Tasks", "Methods", "Fidelity"


def _list(values: tuple[float, ...]) -> str:
    return ",".join(map(str, values))


def evaluate(
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="LABEL=POLICY@PRESET:key=value,... or less of it, POLICY alone; PRESET may be a .toml file; "
            "repeat for more.",
            show_default="all policies, sfi with every preset",
            rich_help_panel=HOW,
        ),
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            help="Sink, selected and recent tokens over the context; comma list.",
            show_default=_list(request.SHARES),
            rich_help_panel=HOW,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Selected tokens per KV head instead of shares; comma list.", rich_help_panel=HOW
        ),
    ] = None,
    recent: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the recent window; at most half of a share.",
            show_default=str(request.RECENT),
            rich_help_panel=HOW,
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Comma list or repeated; see --list-tasks.",
            show_default="bundled-recall for the bundled checkpoint, else all others",
            rich_help_panel=WHAT,
        ),
    ] = None,
    list_tasks: Annotated[
        bool, typer.Option("--list-tasks", help="Print the tasks and stop.", rich_help_panel=WHAT)
    ] = False,
    length: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the prompts; comma list.",
            show_default=_list(request.LENGTHS),
            rich_help_panel=WHAT,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Prompts of each task and length.",
            show_default=str(request.SAMPLES),
            rich_help_panel=WHAT,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the first prompt; the others follow.",
            show_default=str(request.SEED),
            rich_help_panel=WHAT,
        ),
    ] = None,
    fidelity: Annotated[
        Path | None,
        typer.Option(
            help="Text to decode with its own tokens: KL, agreement and perplexity beside full attention's.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens decoded after each prompt of --length tokens.",
            show_default=str(request.TOKENS),
            rich_help_panel=TEXT,
        ),
    ] = None,
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_device_budget: o.KvDeviceBudget = None,
    trust_remote_code: o.TrustRemoteCode = False,
    sets: Annotated[list[str] | None, o.sets("eval", o.MODEL)] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder of the results.",
            show_default="sfi-eval-DATE-TIME",
            rich_help_panel=o.OUTPUT,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the folder.", rich_help_panel=o.OUTPUT),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw score against read to a .png or .svg.", rich_help_panel=o.OUTPUT),
    ] = None,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure what methods cost in quality, at equal numbers of tokens read.

    Every method decodes the same prompts from the same cache, read once. Each result is on the disk before
    the next is made: Ctrl-C or a crash loses at most one sample, and --resume goes on. Tasks of
    lm-evaluation-harness: sfi lm-eval.

    For example:

      sfi eval --length 1024 --samples 10 -o results

      sfi eval -o results --resume --plot results.png

      sfi eval --method full-kv --method sfi --method wide=sfi:span=10,slow_start=2 --share 0.1

      sfi eval --method full-kv --method exact=sfi:lossless=true --share 0.1

      sfi eval --model Qwen/Qwen3-0.6B --task niah-single,variable-tracking --length 8192 --json

      sfi eval --fidelity book.txt --length 4096 --tokens 256 --method sfi --method quest --share 0.15
    """
    from sfi_cli.commands.evaluate.job import EvaluationJob
    from sfi_cli.parsing import words
    from sfi_cli.settings.given import given
    from sfi_cli.terminal.output import Output

    if list_tasks:
        _list_tasks()
        return
    settings = given("eval", sets=sets, options={"engine.kv_device_budget": kv_device_budget})
    asked = {
        "model": model, "dtype": None if dtype == "auto" else dtype,
        "methods": method,
        "shares": request.numbers("share", share, float),
        "budgets": request.numbers("budget", budget, int), "recent": recent,
        "tasks": words(task) if task else None, "lengths": request.numbers("length", length, int),
        "samples": samples, "seed": seed, "fidelity": None if fidelity is None else str(fidelity),
        "tokens": tokens,
        **settings.of("eval"), **settings.of("engine"), **settings.of("model"),
    }  # fmt: skip
    EvaluationJob(
        given=asked,
        loading={"device": device, "trust_remote_code": trust_remote_code},
        folder=output,
        resume=resume,
        force=force,
        output=Output(plot=plot, json=json, force=force, quiet=quiet),
    ).run()


def _list_tasks() -> None:
    from sfi_core.measure.evaluation.tasks import TASKS

    for name, task in TASKS.items():
        typer.echo(f"{name}{'  (for the bundled checkpoint)' if task.bundled else ''}")
