"""`sfi eval`: what a method costs in quality; `sfi lm-eval`, lm-evaluation-harness with the model `sfi`."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli import parsing
from sfi_cli.commands.evaluate import DEFAULTS, shown
from sfi_cli.settings import given
from sfi_cli.terminal.output import Output

WHAT, HOW, TEXT = "Tasks", "Methods", "Fidelity"
METHOD = "LABEL=POLICY@PRESET:key=value,... or less, POLICY alone; PRESET may be a .toml file; repeat for more."
TASKS = "bundled-recall for the bundled checkpoint, else all others"


def _defaulted(panel: str, name: str, text: str) -> Any:
    return o.option(panel, text, shown=shown(DEFAULTS[name]))


def _numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> list[Any] | None:
    # a comma list of ints or floats, at least one
    if text is None:
        return None
    rule = f"{option} must be {'whole numbers' if kind is int else 'numbers'} with commas between"
    return parsing.numbers([text], kind, rule)


def evaluate(
    method: Annotated[o.Words, o.option(HOW, METHOD, shown="all policies, sfi with every preset")] = None,
    share: Annotated[o.Text, _defaulted(HOW, "shares", "Tokens of sparse attention over the context; a list.")] = None,
    recent: Annotated[o.Number, _defaulted(HOW, "recent", "Recent tokens; at most half of a share.")] = None,
    task: Annotated[o.Words, o.option(WHAT, "Comma list or repeated; see --list-tasks.", shown=TASKS)] = None,
    list_tasks: Annotated[bool, o.option(WHAT, "Print the tasks and stop.", "--list-tasks")] = False,
    length: Annotated[o.Text, _defaulted(WHAT, "lengths", "Tokens of the prompts; comma list.")] = None,
    samples: Annotated[o.Number, _defaulted(WHAT, "samples", "Prompts of each task and length.")] = None,
    seed: Annotated[o.Number, _defaulted(WHAT, "seed", "Seed of the first prompt; the others follow.")] = None,
    fidelity: Annotated[o.File, o.option(TEXT, "Decode this text's own tokens: KL, agreement, perplexity.")] = None,
    tokens: Annotated[o.Number, _defaulted(TEXT, "tokens", "Decoded after each prompt of --length tokens.")] = None,
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_device_budget: o.KvDeviceBudget = None,
    trust_remote_code: o.TrustRemoteCode = False,
    sets: Annotated[o.Words, o.sets(o.MODEL)] = None,
    output: Annotated[o.File, o.output("Folder of the results.", shown="sfi-eval-DATE-TIME")] = None,
    resume: Annotated[bool, o.option(o.OUTPUT, "Go on with the folder.", "--resume")] = False,
    plot: Annotated[o.File, o.plot("score against read")] = None,
    force: o.Force = False,
    wide: o.Wide = False,
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

      sfi eval --model Qwen/Qwen3-0.6B --task niah-single,variable-tracking --length 8192 --json

      sfi eval --fidelity book.txt --length 4096 --tokens 256 --method sfi --method quest --share 0.15
    """
    from sfi_cli.commands.evaluate.job import run

    if list_tasks:
        from sfi_core.measure.evaluation.tasks import TASKS

        for name, known in TASKS.items():
            typer.echo(f"{name}{'  (for the bundled checkpoint)' if known.bundled else ''}")
        return
    settings = given("eval", sets=sets, options={"engine.kv_device_budget": kv_device_budget})
    asked = {
        "model": model, "dtype": None if dtype == "auto" else dtype,
        "methods": method,
        "shares": _numbers("share", share, float), "recent": recent,
        "tasks": parsing.words(task) if task else None, "lengths": _numbers("length", length, int),
        "samples": samples, "seed": seed, "fidelity": None if fidelity is None else str(fidelity),
        "tokens": tokens,
        **settings.of("eval"), **settings.of("engine"), **settings.of("model"),
    }  # fmt: skip
    written = Output(plot=plot, json=json, force=force, quiet=quiet, wide=wide)
    loading = {"device": device, "trust_remote_code": trust_remote_code}
    run(asked, loading, output, written, resume=resume)


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with slow-fast decoding as its model "sfi", unless --model names another.

    Every argument goes to lm-eval; sfi lm-eval run --help shows its own help. Arguments of the model:
    pretrained (as --model elsewhere, or bundled), policy, preset, backend, device, dtype, kv_device_budget
    and every setting of decoding. With --use_cache give each method a file of its own.

    For example:

      sfi lm-eval --model_args pretrained=smollm2,policy=codescan,budget=1024 --tasks gsm8k

      sfi lm-eval --model_args selector.alpha=0.4 --tasks lambada --limit 50 -o results

      sfi lm-eval ls tasks
    """
    from sfi_core.measure.evaluation.lm_eval_run import run_lm_eval

    run_lm_eval(context.args)
