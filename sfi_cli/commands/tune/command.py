"""`sfi tune`: search settings on traces, confirm them with real runs, write a file for `--config`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli import options as o

SPACE, SEARCH, CONFIRM = "Search space: 8,16,32 or 8:64", "Search", "Confirmation"
OUTPUT = Path("tuned.toml")
Values = str | None


def _axis(help_text: str, default: str) -> Any:
    return typer.Option(help=help_text, show_default=default, rich_help_panel=SPACE)


def _option(help_text: str, panel: str, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel, **more)


def tune(
    traces: Annotated[
        list[Path], typer.Argument(help="Traces of --audit 1, of one model.", metavar="DIR...")
    ],
    trigger_policy: Annotated[
        Values,
        _axis(
            "boundary, t-max, stride, cosine, random, never, always.",
            "boundary,cosine,stride,t-max",
        ),
    ] = None,
    trigger_set: Annotated[
        list[str] | None,
        _axis(
            "A set of trigger strings, blanks between: NAME='. ? !'. Repeat for more.",
            "the trace's own and punctuation",
        ),
    ] = None,
    t_max: Annotated[Values, _axis("Most fast steps in a row.", "8:128")] = None,
    trigger_delay: Annotated[
        Values, _axis("Steps from a boundary to its slow step.", "0,1,2")
    ] = None,
    min_gap: Annotated[
        Values, _axis("Steps after a slow step in which triggers do not count.", "0:16")
    ] = None,
    slow_start: Annotated[Values, _axis("Steps from the first on that are slow.", "1,2")] = None,
    stride: Annotated[Values, _axis("Steps between slow steps under stride.", "4:64")] = None,
    cosine_threshold: Annotated[
        Values, _axis("Query cosine under which cosine is slow.", "what was recorded")
    ] = None,
    budget: Annotated[
        Values, _axis("Selected tokens per KV head (K).", "1/64 to 1/4 of the context")
    ] = None,
    recent: Annotated[
        Values, _axis("Tokens of the recent window.", "32 to 1/8 of the context")
    ] = None,
    span: Annotated[
        Values, _axis("Positions on each side that a hit brings along.", "0:16")
    ] = None,
    mine: Annotated[
        bool,
        typer.Option(
            "--mine/--no-mine",
            help="Search trigger sets mined from the traces too, where they beat punctuation.",
            rich_help_panel=SPACE,
        ),
    ] = True,
    objective: Annotated[
        list[str] | None,
        _option(
            "slow-rate, bytes, retained, retained-p5; comma list or repeated.",
            SEARCH,
            show_default="bytes,retained",
        ),
    ] = None,
    min_retained: Annotated[
        float | None, _option("Least mean retained mass, as replayed.", SEARCH)
    ] = None,
    max_read: Annotated[
        float | None, _option("Largest share of the cached tokens read.", SEARCH)
    ] = None,
    trials: Annotated[
        int, _option("Trials of the study in all, by every process on it.", SEARCH, min=1)
    ] = 200,
    timeout: Annotated[
        float | None, _option("Seconds after which no new trial begins.", SEARCH, min=0.0)
    ] = None,
    sampler: Annotated[str, _option("tpe or nsga2.", SEARCH)] = "tpe",
    seed: Annotated[int, _option("Seed of the sampler.", SEARCH, min=0, max=2**32 - 1)] = 0,
    study: Annotated[
        Path | None,
        _option(
            "File of the study, which processes may share: .db (SQLite) or .journal.",
            SEARCH,
            show_default="the output's name, .journal",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the study if it is there.", rich_help_panel=SEARCH
        ),
    ] = False,
    batch_size: Annotated[
        int, _option("Requests that share the weights in the byte model.", SEARCH, min=1)
    ] = 1,
    confirm: Annotated[
        int,
        _option(
            "Run so many settings of the front for real, the chosen one among them.", CONFIRM, min=0
        ),
    ] = 0,
    prompt_file: Annotated[
        Path | None,
        _option("Run them on this prompt.", CONFIRM, show_default="the traces' own prompts"),
    ] = None,
    batch: Annotated[
        Path | None, _option('Run them on JSON Lines: {"prompt": ...} a line.', CONFIRM)
    ] = None,
    model: o.Model = None,
    revision: o.Revision = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    backend: o.Backend = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Settings for --config.", rich_help_panel=o.OUTPUT),
    ] = OUTPUT,
    plot: Annotated[
        Path | None,
        _option("Draw trials, front and what was measured to a .png or .svg.", o.OUTPUT),
    ] = None,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    r"""Search trigger sets, T_max, budget and more on recorded runs, without the model.

    Every trial is a replay of the traces (sfi trace replay). The settings that no other beats make the front;
    --confirm runs some of them for real, with --model. The one chosen is written for --config.

    For example:

      sfi tune dense --confirm 3 --plot front.png

      sfi tune dense --min-retained 0.6 --budget 64:512 --objective slow-rate,retained -o cheap.toml

      sfi tune code chat --trigger-set lines="\n" --no-mine --study shared.db --resume --trials 500
    """
    from sfi_cli.commands.tune.job import Confirming, Searching, TuneJob
    from sfi_cli.terminal.output import Output

    TuneJob(
        traces=traces,
        axes={
            "trigger_policy": trigger_policy, "t_max": t_max, "trigger_delay": trigger_delay,
            "min_gap": min_gap, "slow_start": slow_start, "stride": stride,
            "cosine_threshold": cosine_threshold, "budget": budget, "recent": recent, "span": span,
        },
        trigger_sets=trigger_set or [],
        mine=mine,
        searching=Searching(
            objectives=objective or [], min_retained=min_retained, max_read=max_read, trials=trials,
            timeout=timeout, sampler=sampler, seed=seed, study=study or output.with_suffix(".journal"),
            resume=resume, batch_size=batch_size,
        ),
        confirming=Confirming(
            count=confirm, prompt_file=prompt_file, batch=batch, model=model, backend=backend,
            loading={
                "revision": revision, "dtype": dtype, "device": device,
                "trust_remote_code": trust_remote_code,
            },
        ),
        output=Output(output, plot=plot, force=force, json=json, quiet=quiet),
    ).run()  # fmt: skip
