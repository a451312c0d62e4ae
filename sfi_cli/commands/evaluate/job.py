"""`sfi eval` after its options are read."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfi_cli.commands.evaluate import request
from sfi_cli.commands.evaluate.progress import EvaluationProgress
from sfi_cli.commands.evaluate.same import check_same
from sfi_cli.commands.evaluate.views import evaluation_text
from sfi_cli.terminal.output import Output, dated_folder, leave_interrupted
from sfi_core.errors import ConfigError, SfiError
from sfi_core.measure.evaluation.grid import Grid
from sfi_core.measure.evaluation.lossless_rows import check_exact


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationJob:
    """The options of `sfi eval`.

    Attributes:
        given: Values of the options; None for an option that was not given.
        loading: Arguments of `load` that a results folder does not keep.
        folder: Folder of the results; None makes a new folder named after the time.
        resume: Whether to complete the results in the folder.
        force: Whether the results in the folder may be replaced.
    """

    given: Mapping[str, Any]
    loading: Mapping[str, Any]
    folder: Path | None
    resume: bool
    force: bool
    output: Output

    def run(self) -> None:
        """Make the rows that the folder lacks, and show all rows."""
        if self.resume and self.folder is None:
            raise ConfigError("resume must come with --output DIR, got none")
        with self.output:
            results, interrupted = self._results()
            document = document_of(results)
            self.output.show(document, evaluation_text)
            if document["rows"]:
                from sfi_traces.results.evaluation.plots import write_plot

                self.output.figure(write_plot, document)
        if interrupted:
            leave_interrupted(f"interrupted; go on with: sfi eval -o {results.path} --resume")
        self.output.say(f"Wrote {results.path}")
        check_exact(results.rows["samples"], results.manifest["model"]["dtype"])

    def _results(self) -> tuple[Any, bool]:
        # the folder with all its rows, and whether Ctrl-C ended the run
        from sfi_traces.results.evaluation.evaluation_manifest import check_new
        from sfi_traces.results.evaluation.store import ResultsFolder

        path = self.folder or dated_folder("sfi-eval")
        results = None
        if self.resume:
            results = ResultsFolder.resume(path)
            for line in results.damaged:
                self.output.say(f"{line}; its row is made again")
            asked = request.resumed(self.given, results.manifest["asked"])
        else:
            check_new(path, force=self.force)
            asked = request.filled(self.given)
        if self.output.plot is not None and not asked["tasks"]:
            raise ConfigError("plot shows scores and must come with --task, got none")
        text = _text(asked["fidelity"])
        parts = request.parts_of(asked, text)
        facts = {
            "asked": dict(asked),
            "methods": plain(request.described(request.methods_of(asked))),
            "text": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        }
        if results is not None:
            _check_facts(results, facts, ("methods", "text"))
            if results.manifest["finished"] and not any(_left(part, results) for part in parts):
                results.leave()
                results.order(parts)
                return results, False
        model, tokenizer = self._loaded(asked)
        for part in parts:
            part.check(model, tokenizer)
        facts |= _facts(model)
        if results is None:
            results = ResultsFolder.create(path, facts, force=self.force)
        else:
            _check_facts(results, facts, ("model",))
        return results, self._run(results, parts, model, tokenizer, asked)

    def _loaded(self, asked: Mapping[str, Any]) -> tuple[Any, Any]:
        from sfi_core.engine.backends.registry import check_backend
        from sfi_core.models.load import load, resolve_device

        check_backend(asked["backend"], resolve_device(self.loading["device"]))
        return load(
            asked["model"], revision=asked["revision"], dtype=asked["dtype"], **self.loading
        )

    def _run(
        self,
        results: Any,
        parts: Sequence[Grid],
        model: Any,
        tokenizer: Any,
        asked: Mapping[str, Any],
    ) -> bool:
        # make the missing rows; return whether Ctrl-C ended the run
        options = {
            "engine": request.engine_of(asked), "batch_size": asked["batch_size"],
        }  # fmt: skip
        stopped: str | None = "interrupted"
        try:
            results.begin()
            for part in parts:
                weights = map(part.weight, _left(part, results))
                done = {part.key(row) for row in results.rows[part.table]}
                with EvaluationProgress(part.table, weights, quiet=self.output.quiet) as shown:
                    for row in part.run(model, tokenizer, done, **options):
                        results.append(part.table, row)
                        shown.update(part.weight(part.key(row)))
            stopped = None
        except KeyboardInterrupt:
            pass
        except SfiError as error:
            stopped = str(error)
            raise
        finally:
            results.close(stopped, parts)
        return stopped is not None


def document_of(results: Any) -> dict[str, Any]:
    """Sum a folder's results up as the document of `--json`."""
    from sfi_traces.results.evaluation.averages import summarize_averages
    from sfi_traces.results.evaluation.summary import summarize, summarize_fidelity

    manifest = results.manifest
    names = ("asked", "model", "device", "machine", "versions", "created", "finished", "stopped")
    return {
        "results": str(results.path),
        **{name: manifest[name] for name in names},
        "rows": summarize(results.rows["samples"]),
        "averages": summarize_averages(results.rows["samples"]),
        "fidelity": summarize_fidelity(results.rows["fidelity"]),
        "samples": str(results.path / "samples.jsonl"),
    }


def _check_facts(results: Any, facts: Mapping[str, Any], names: Sequence[str]) -> None:
    from sfi_core.machine.versions import versions

    for name in names:
        manifest = results.manifest
        check_same(name, facts[name], manifest[name], (versions(), manifest["versions"]))


def plain(value: Any) -> Any:
    """Return a value as it comes back from JSON: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))


def _facts(model: Any) -> dict[str, Any]:
    from sfi_core.machine.describe import describe
    from sfi_core.machine.versions import versions
    from sfi_core.models.describe import describe_model

    return {
        "model": plain(describe_model(model, ())),
        "device": str(model.device),
        "machine": describe(),
        "versions": versions(),
    }


def _text(path: str | None) -> str | None:
    if path is None:
        return None
    from sfi_core.measure.evaluation.text_grid import read_text

    return read_text(Path(path))


def _left(part: Grid, results: Any) -> list[Any]:
    # keys of the rows that are missing or failed
    done = {part.key(row) for row in results.rows[part.table] if row["error"] is None}
    return [key for key in part.keys if key not in done]
