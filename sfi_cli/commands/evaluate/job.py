"""`sfi eval` after its options are read."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfi_cli.commands.evaluate import DEFAULTS, METHODS, shown
from sfi_cli.commands.evaluate.views import evaluation_text
from sfi_cli.parsing import read_text
from sfi_cli.terminal.output import Output, dated_folder, leave_interrupted
from sfi_cli.terminal.progress import Progress
from sfi_core.errors import ConfigError, SfiError
from sfi_core.machine.memory import describe
from sfi_core.machine.versions import versions
from sfi_core.measure.evaluation.fidelity import WindowRows, window_cells
from sfi_core.measure.evaluation.grid import TASKS, TEXT, Cell, Method, Rows, at_sizes, key_of
from sfi_core.measure.evaluation.samples import SampleRows, sample_cells
from sfi_core.measure.evaluation.tasks import TASKS as LISTED
from sfi_core.models.describe import describe_model
from sfi_core.settings.engine import EngineOptions
from sfi_traces.record.folder import check_new
from sfi_traces.results import summarize, summarize_fidelity
from sfi_traces.results.store import KIND, ResultsFolder

BUNDLED_ONLY = ("synckv",)  # needs a head file, which few other models have
LISTS = ("methods", "shares", "tasks", "lengths")
NAMED = ("label", "policy", "preset", "settings")
ENGINE = ("backend", "kv_dtype", "prefill_chunk", "kv_device_budget", "kv_page")


def run(
    given: Mapping[str, Any], loading: Mapping[str, Any], folder: Path | None, output: Output, *, resume: bool
) -> None:
    """Make the rows that the folder lacks, by default of a new one named after the time, and show all rows.

    `given` are values of the options, None for one that was not given; `loading` arguments of `load` that a results
    folder does not keep.
    """
    if resume and folder is None:
        raise ConfigError("resume must come with --output DIR, got none")
    with output:
        path = folder or dated_folder("sfi-eval")
        results, interrupted = _results(given, loading, path, output, resume=resume)
        document = _document(results)
        output.show(document, evaluation_text)
        if document["rows"]:
            from sfi_traces.results.plots import plot_evaluation

            output.figure(plot_evaluation, document)
    if interrupted:
        leave_interrupted(f"interrupted; go on with: sfi eval -o {results.path} --resume")
    output.say(f"Wrote {results.path}")


def _results(
    given: Mapping[str, Any], loading: Mapping[str, Any], path: Path, output: Output, *, resume: bool
) -> tuple[ResultsFolder, bool]:
    # the folder with all its rows, and whether Ctrl-C ended the run
    from sfi_core.engine.attend import check_backend
    from sfi_core.models.load import load, resolve_device

    results = None
    if resume:
        results = ResultsFolder.resume(path)
        for line in results.damaged:
            output.say(f"{line}; its row is made again")
        asked = resumed(given, results.manifest["asked"])
    else:
        check_new(path, KIND, force=output.force)
        asked = filled(given)
    if output.plot is not None and not asked["tasks"]:
        raise ConfigError("plot shows scores and must come with --task, got none")
    text = None if asked["fidelity"] is None else read_text(Path(asked["fidelity"]), "text")
    methods = [Method.parse(written) for written in asked["methods"]]
    cells = cells_of(asked, methods)
    facts = {
        "asked": dict(asked),
        # with all settings: a preset may change between versions
        "methods": _plain(
            [{name: getattr(way, name) for name in NAMED} | {"config": way.config.to_dict()} for way in methods]
        ),
        "text": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
    }
    if results is not None:
        check_same(facts, results.manifest, ("methods", "text"))
        if results.manifest["finished"] and not _missing(cells, results):
            results.leave()
            results.order(cells)
            return results, False
    check_backend(asked["backend"], resolve_device(loading["device"]))
    loaded = load(asked["model"], revision=asked["revision"], dtype=asked["dtype"], **loading)
    tables = _tables(asked, cells, text, loaded)
    facts |= {
        "model": _plain(describe_model(loaded[0], ())),
        "device": str(loaded[0].device),
        "machine": describe(),
        "versions": versions(),
    }
    if results is None:
        results = ResultsFolder.create(path, facts, force=output.force)
    else:
        check_same(facts, results.manifest, ("model",))
    return results, _run(results, cells, tables, quiet=output.quiet)


def cells_of(asked: Mapping[str, Any], methods: Sequence[Method]) -> list[Cell]:
    """List the rows to make, of tasks, then of windows of the text; raise `ConfigError` for an invalid grid."""
    sized = at_sizes(methods, shares=asked["shares"], recent=asked["recent"])
    cells: list[Cell] = []
    if asked["tasks"]:
        seeds = range(asked["seed"], asked["seed"] + asked["samples"])
        cells += sample_cells(sized, asked["tasks"], asked["lengths"], seeds)
    if asked["fidelity"] is not None:
        cells += window_cells(sized, asked["lengths"], asked["windows"], asked["tokens"])
    return cells


def _tables(
    asked: Mapping[str, Any], cells: Sequence[Cell], text: str | None, loaded: tuple[Any, Any]
) -> dict[str, Rows[Any]]:
    # what makes the rows of each table, once its cells are checked
    engine, tables = EngineOptions(**{name: asked[name] for name in ENGINE}), dict[str, Rows[Any]]()
    if asked["tasks"]:
        tables[TASKS] = SampleRows(*loaded, engine)
    if text is not None:
        tables[TEXT] = WindowRows(*loaded, engine, text=text, tokens=asked["tokens"], count=asked["windows"])
    for table, rows in tables.items():
        rows.check([cell for cell in cells if cell.table == table])
    return tables


def _run(results: ResultsFolder, cells: Sequence[Cell], tables: Mapping[str, Rows[Any]], *, quiet: bool) -> bool:
    # make the missing rows; return whether Ctrl-C ended the run
    stopped: str | None = "interrupted"
    try:
        results.begin()
        for table, rows in tables.items():
            missing = [cell for cell in _missing(cells, results) if cell.table == table]
            with Progress(quiet=quiet) as progress:
                for done, row in enumerate(rows.make(missing), 1):
                    results.append(table, row)
                    progress.update(table, done, len(missing))
        stopped = None
    except KeyboardInterrupt:
        pass
    except SfiError as error:
        stopped = str(error)
        raise
    finally:
        results.close(stopped, cells)
    return stopped is not None


def _missing(cells: Sequence[Cell], results: ResultsFolder) -> list[Cell]:
    # cells whose row is missing or failed
    done = {key_of(row) for rows in results.rows.values() for row in rows if row["error"] is None}
    return [cell for cell in cells if cell.key not in done]


def _document(results: ResultsFolder) -> dict[str, Any]:
    # sum a folder's results up as the document of `--json`
    manifest = results.manifest
    names = ("asked", "model", "device", "machine", "versions", "created", "finished", "stopped")
    return {
        "results": str(results.path),
        **{name: manifest[name] for name in names},
        "rows": summarize(results.rows["samples"]),
        "fidelity": summarize_fidelity(results.rows["fidelity"]),
        "samples": str(results.path / "samples.jsonl"),
    }


def _plain(value: Any) -> Any:
    # as it comes back from JSON: tuples become lists, keys become strings
    return json.loads(json.dumps(value))


def filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the defaults in; raise `ConfigError` for options of fidelity without `fidelity`, and the reverse."""
    chosen = {name: value for name, value in given.items() if value is not None}
    asked = DEFAULTS | chosen
    if asked["model"] is not None and "methods" not in chosen:
        asked["methods"] = [name for name in METHODS if name not in BUNDLED_ONLY]
    for name in ("tokens", "windows"):
        if name in chosen and "fidelity" not in chosen:
            raise ConfigError(f"{name} must come with --fidelity, got it alone")
    if asked["tasks"] is None:
        general = [name for name, task in LISTED.items() if not task.bundled]
        asked["tasks"] = [] if asked["fidelity"] else ["bundled-recall"] if asked["model"] is None else general
    return asked


def resumed(given: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the folder's first run, `before`; raise `ConfigError` for others, or unknown ones."""
    for name in before:
        if name not in DEFAULTS and before[name] is not None:
            raise ConfigError(f"results folder must be of options that this sfi knows, got {name} {before[name]}")
    for name, value in given.items():
        # a folder of an earlier version lacks newer options
        earlier = before.get(name, DEFAULTS[name])
        if value is not None and value != earlier:
            option = name.removesuffix("s") if name in LISTS else name.replace("_", "-")
            raise ConfigError(f"resume must keep the folder's {option} {shown(earlier)}, got {shown(value)}")
    return DEFAULTS | dict(before)


def check_same(facts: Mapping[str, Any], manifest: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise `ConfigError` if facts of these names are not those of the folder."""
    for name in names:
        if facts[name] != manifest[name]:
            ours, theirs = versions().get("sfi"), manifest["versions"].get("sfi")
            since = f"; the folder is of sfi {theirs}, this is {ours}" if ours != theirs else ""
            raise ConfigError(f"resume must keep the {name} in the folder's manifest.json, got another{since}")
