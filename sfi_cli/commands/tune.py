"""`sfi tune`: search settings on traces, confirm them with real runs, write a file for --config."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_cli.commands.trace.replay.views import OUTCOME, everywhere, varied
from sfi_cli.options import Subject
from sfi_cli.parsing import named_strings
from sfi_cli.settings import DIMENSIONS, SETTINGS, given, texts
from sfi_cli.terminal.output import Output, leave_interrupted
from sfi_cli.terminal.tables import Part
from sfi_core.errors import require
from sfi_core.settings.engine import EngineOptions
from sfi_traces.views.table import Columns, Row, Table, number, percent, plural

SPACE, SEARCH = "Search space: 8,16,32 or 8:64", "Search"
_space, _search = partial(o.option, SPACE), partial(o.option, SEARCH)
OUTPUT = Path("tuned.toml")


def tune(
    traces: Annotated[list[Path], typer.Argument(help="Traces of --audit 1, of one model.", metavar="DIR...")],
    trigger_policy: Annotated[o.Text, _space(o.POLICIES_OF_TRIGGERS, shown="boundary,stride,t-max")] = None,
    trigger_set: Annotated[o.Words, _space(o.TRIGGER_SET, shown="the trace's own and punctuation")] = None,
    t_max: Annotated[o.Text, _space(SETTINGS["t_max"].brief, shown="8:128")] = None,
    budget: Annotated[o.Text, _space(SETTINGS["budget"].brief, shown="1/64 to 1/4 of the context")] = None,
    search: Annotated[o.Words, _space("Another dimension: span=0:16 or span=0,4,8.", metavar="NAME=VALUES")] = None,
    min_retained: Annotated[o.Real, _search("Least mean retained mass, as replayed.")] = None,
    max_read: Annotated[o.Real, _search("Largest share of the cached tokens read.")] = None,
    trials: Annotated[int, _search("Settings to try.", min=1)] = 200,
    seed: Annotated[int, _search("Seed of the sampler.", min=0, max=2**32 - 1)] = 0,
    confirm: Annotated[int, _search("Run so many of the front for real, the chosen one among them.", min=0)] = 0,
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    sets: Annotated[o.Words, o.sets(SEARCH)] = None,
    output: Annotated[Path, o.output("Settings for --config.")] = OUTPUT,
    plot: Annotated[o.File, o.plot("trials, front and what was measured")] = None,
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
    from sfi_cli.terminal.progress import Progress
    from sfi_traces.model.trace import Trace
    from sfi_traces.tune.result import find, plot_tuning
    from sfi_traces.tune.tuning import Limits, Tuning

    settings = given("tune", sets=sets)
    require("tuning needs", "tune", "optuna", "scipy")
    options = {"trigger_policy": trigger_policy, "t_max": t_max, "budget": budget}
    axes, trigger_sets = texts(DIMENSIONS, search, options), named_strings(trigger_set)
    with Output(output, plot=plot, force=force, json=json, quiet=quiet, wide=wide) as written:
        tuning = Tuning.of(
            [Trace.open(path) for path in traces],
            axes=axes,
            trigger_sets=trigger_sets,
            limits=Limits(min_retained=min_retained, max_read=max_read),
        )
        confirmer = None
        if confirm:  # loads the model before the search, to report a mistake early
            from sfi_core.engine.attend import check_backend
            from sfi_core.models.load import resolve_device
            from sfi_traces.tune.confirm import Confirmer

            engine = settings.table(EngineOptions)
            check_backend(engine.backend, resolve_device(device))
            loaded = Subject.of(settings, model, dtype, device, trust_remote_code).loaded()
            confirmer = Confirmer.of(tuning, *loaded, engine)
        with Progress(quiet=quiet) as progress:
            show = partial(progress.update, "searching", total=trials)
            result = find(tuning, trials, seed=seed, on_trial=show)
        if confirmer is not None and not result.interrupted:
            with Progress(quiet=quiet) as progress:
                result = result.confirm(partial(confirmer, on_run=partial(progress.update, "confirming")), confirm)
        document = result.document()
        if result.front:
            written.show(document, tune_text)
            written.figure(plot_tuning, document)
            written.text(result.toml())
    if result.interrupted:
        leave_interrupted()


ROWS = 16  # of the front
LEFT_OUT = ("worst", "overlap")  # columns of a replay that the front does not show
ANSWERS = {True: "right", False: "WRONG", None: "-"}


def tune_text(document: Row) -> list[Part]:
    """Return the front, the real runs and the chosen setting."""
    whole, budget = document["recorded_budget"], document["recorded"]["budget"]
    cut = f", but for its budget of {whole:,}: the audit recorded {budget:,}" if budget < whole else ""
    heading = (
        f"{', '.join(document['traces'])}: {document['model']}, {plural(document['requests'], 'request')}, "
        f"{plural(document['steps'], 'step')}; {plural(document['trials'], 'trial')}, "
        f"{document['distinct_trials']:,} of them different"
    )
    parts: list[Part] = [
        heading,
        "",
        _front(document),
        *everywhere([*document["front"], document["recorded"]]),
        f"* the trace's own setting{cut}; > chosen; x run for real.",
    ]
    if document["confirmed"]:
        title = "Run for real: retained mass of fast steps, predicted (at least) and measured, over compared steps"
        spare = ("steps", "kept, predicted", "slow")
        parts += ["", Table.of(title, CONFIRMED, document["confirmed"], spare=spare), *_confirmed_notes(document)]
    place = next(i for i, row in enumerate(document["front"], 1) if row["chosen"])
    run = f" Run it with --policy {document['policy']}." if document["policy"] != "sfi" else ""
    return [*parts, "", f"Chosen: {place}, {document['rule']}.{run}"]


def _front(document: Row) -> Table:
    # of a long front the settings that are chosen or confirmed, and others evenly apart
    front = document["front"]
    confirmed = {row["place"] for row in document["confirmed"]}
    step = max(1, -(-len(front) // ROWS))
    chosen = {place for place, row in enumerate(front) if row["chosen"]}
    shown = sorted(confirmed | chosen | {*range(0, len(front), step), len(front) - 1})
    rows = [{"": f"{at + 1}{' >' * front[at]['chosen']}{' x' * (at in confirmed)}", **front[at]} for at in shown]
    rows.append({"": "*", **document["recorded"]})
    more = f", {len(shown)} of {len(front)} settings shown" if len(shown) < len(front) else ""
    title = f"Pareto front as replayed, cheapest first{more} (byte model: batch 1)"
    settings, words = varied(rows)
    outcome = {name: column for name, column in OUTCOME.items() if name not in LEFT_OUT}
    columns = {"": (str, "")} | settings | outcome
    return Table.of(title, columns, rows, left=1 + words, spare=("p5", "at most", "MB/token"))


def _confirmed_notes(document: Row) -> list[str]:
    rows = document["confirmed"]
    mean = sum(abs(row["error"]) for row in rows) / len(rows)
    lines = [
        f"off by: predicted less measured, its size on average {mean:.3f}.",
        "steps: compared ones, up to the first token that differs from the trace's.",
        f"Full attention: {document['full_kv_tokens_per_second']:,.1f} tokens/s.",
    ]
    chosen = [row for row in rows if document["front"][row["place"]]["chosen"]]
    if any(row["steps"] < row["recorded_steps"] for row in chosen):
        lines.append("The chosen setting writes other tokens than the trace: read them before you use it.")
    return lines


CONFIRMED: Columns = {
    "": lambda row: str(row["place"] + 1),
    "slow": lambda row: percent(row["measured"]["slow_rate"]),
    "kept, predicted": lambda row: number(row["predicted"]["retained_mass"]),
    "measured": lambda row: number(row["measured"]["retained_mass"]),
    "off by": lambda row: f"{row['error']:+.3f}",
    "steps": lambda row: f"{row['steps']} of {row['recorded_steps']}",
    "KL": (partial(number, digits=4), "kl_next_token"),
    "argmax": (percent, "argmax_agreement"),
    "tokens/s": (partial(number, digits=1), "decode_tokens_per_second"),
    "answer": (ANSWERS.__getitem__, "exact_match"),
}
