"""`sfi tune`: search settings on traces, confirm them with real runs, write a file for --config."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.commands.generate.prompts import read_prompts
from sfi_cli.commands.tune.views import tune_text
from sfi_cli.parsing import named_strings, words
from sfi_cli.settings.given import given, texts
from sfi_cli.settings.tables import DIMENSIONS, SETTINGS, TRIALS, ModelTable
from sfi_cli.settings.text import completer
from sfi_cli.terminal.output import Output, leave_interrupted
from sfi_core.errors import ConfigError, InputError
from sfi_core.settings.engine import EngineOptions

SPACE, SEARCH, CONFIRM = "Search space: 8,16,32 or 8:64", "Search", "Confirmation"
_search, _confirm = partial(o.option, SEARCH), partial(o.option, CONFIRM)
OUTPUT = Path("tuned.toml")
Values = str | None


def _axis(name: str, default: str, **more: Any) -> Any:
    shown = {"help": SETTINGS[name].brief, "show_default": default, **more}
    return typer.Option(rich_help_panel=SPACE, **shown)


def tune(
    traces: Annotated[list[Path], typer.Argument(help="Traces of --audit 1, of one model.", metavar="DIR...")],
    trigger_policy: Annotated[
        Values,
        _axis(
            "trigger_policy",
            "boundary,stride,t-max",
            help="boundary, t-max, stride, random, never, always; or codescan.",
        ),
    ] = None,
    trigger_set: Annotated[
        o.Words,
        _axis(
            "triggers",
            "the trace's own and punctuation",
            help="A set of trigger strings, blanks between: NAME='. ? !'. Repeat for more.",
        ),
    ] = None,
    t_max: Annotated[Values, _axis("t_max", "8:128")] = None,
    budget: Annotated[Values, _axis("budget", "1/64 to 1/4 of the context")] = None,
    search: Annotated[
        o.Words,
        o.option(
            SPACE,
            "Another dimension, repeat for more: span=0:16 or span=0,4,8.",
            metavar="NAME=VALUES",
            autocompletion=completer(DIMENSIONS),
        ),
    ] = None,
    objective: Annotated[
        o.Words, _search("slow-rate, bytes, retained, retained-p5; comma list or repeated.", shown="bytes,retained")
    ] = None,
    min_retained: Annotated[float | None, _search("Least mean retained mass, as replayed.")] = None,
    max_read: Annotated[float | None, _search("Largest share of the cached tokens read.")] = None,
    trials: Annotated[int, _search("Trials of the study in all, by every process on it.", min=1)] = TRIALS,
    seed: Annotated[int, _search("Seed of the sampler.", min=0, max=2**32 - 1)] = 0,
    study: Annotated[
        o.File,
        _search(
            "File of the study, which processes may share: Optuna's .journal.", shown="the output's name, .journal"
        ),
    ] = None,
    resume: Annotated[bool, _search("Go on with the study if it is there.", "--resume")] = False,
    confirm: Annotated[
        int, _confirm("Run so many settings of the front for real, the chosen one among them.", min=0)
    ] = 0,
    prompt_file: Annotated[o.File, _confirm("Run them on this prompt.", shown="the traces' own prompts")] = None,
    batch: Annotated[o.File, _confirm('Run them on JSON Lines: {"prompt": ...} a line.')] = None,
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    sets: Annotated[o.Words, o.sets("tune", SEARCH)] = None,
    output: Annotated[Path, o.output("Settings for --config.")] = OUTPUT,
    plot: Annotated[o.File, o.option(o.OUTPUT, "Draw trials, front and what was measured to a .png or .svg.")] = None,
    force: o.Force = False,
    wide: o.Wide = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    r"""Search trigger sets, T_max, budget and more on recorded runs, without the model.

    Every trial is a replay of the traces (sfi trace replay). The settings that
    no other beats make the front; --confirm runs some for real. KV heads are
    clustered by sfi tune heads; a trace in a folder heads is ./heads.

    For example:

      sfi tune dense --confirm 3 --plot front.png

      sfi tune code chat --trigger-set lines="\n" --search span=0:16 --trials 500
    """
    from sfi_cli.terminal.progress import BenchProgress
    from sfi_traces.model.trace import Trace
    from sfi_traces.tune.plots import plot_tuning
    from sfi_traces.tune.result import find
    from sfi_traces.tune.study import check_optuna, check_path
    from sfi_traces.tune.tuning import Limits, Tuning, objectives

    settings = given("tune", sets=sets)
    file = study or output.with_suffix(".journal")
    check_optuna()
    check_path(file, resume=resume)
    if (prompt_file or batch) and not confirm:
        raise ConfigError("prompt-file and batch must come with --confirm, got none")
    options = {"trigger_policy": trigger_policy, "t_max": t_max, "budget": budget}
    axes, trigger_sets = texts(DIMENSIONS, search, options), named_strings(trigger_set)
    with Output(output, plot=plot, force=force, json=json, quiet=quiet, wide=wide) as written:
        tuning = Tuning.of(
            [Trace.open(path) for path in traces],
            axes=axes,
            trigger_sets=trigger_sets,
            objectives=objectives(words(objective)),
            limits=Limits(min_retained=min_retained, max_read=max_read),
        )
        confirmer = None
        if confirm:  # loads the model before the search, to report a mistake early
            loading = {
                "revision": settings.table(ModelTable).revision, "dtype": dtype, "device": device,
                "trust_remote_code": trust_remote_code,
            }  # fmt: skip
            from sfi_traces.tune.confirm import load_confirmer

            prompts = read_texts(prompt_file, batch)
            confirmer = load_confirmer(tuning, prompts, model, settings.table(EngineOptions), loading)
        opened = tuning.open(file, seed=seed, resume=resume)
        with BenchProgress(quiet=quiet) as progress:
            show = partial(progress.update, "searching", total=trials)
            result = find(tuning, opened, trials, on_trial=show)
        if confirmer is not None and not result.interrupted:
            with BenchProgress(quiet=quiet) as progress:
                result = result.confirm(partial(confirmer, on_run=partial(progress.update, "confirming")), confirm)
        document = result.document()
        if result.front:
            written.show(document, tune_text)
        if result.interrupted:
            leave_interrupted(
                f"interrupted; the study is kept: go on with the same options and --study {file} --resume"
            )
        written.figure(plot_tuning, document)
        written.text(result.toml())


def read_texts(prompt_file: Path | None, batch: Path | None) -> list[str]:
    """Read the prompts that the options name; none without such an option.

    Raises `InputError` for a file without prompts, or with messages.
    """
    if prompt_file is None and batch is None:
        return []
    entries = read_prompts(None, prompt_file, batch).entries
    texts = [entry for entry in entries if isinstance(entry, str)]
    if len(texts) < len(entries):
        raise InputError(f"batch {batch} must hold prompts, got messages")
    return texts
