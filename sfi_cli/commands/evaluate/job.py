"""What `sfi eval` does between its options and its output."""

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfi_cli.commands.evaluate.request import (
    described,
    engine_of,
    filled,
    methods_of,
    parts_of,
    resumed,
)
from sfi_cli.commands.evaluate.views import evaluation_text
from sfi_cli.terminal.output import Output, dated_folder, leave_interrupted
from sfi_cli.terminal.progress import Progress
from sfi_core.errors import ConfigError, SfiError


class EvaluationProgress(Progress):
    """Shows how many results are there, and about how long the others will take."""

    def __init__(self, what: str, weights: Iterable[int], *, quiet: bool) -> None:
        """Take a weight of every result that is to come, such as its context's length."""
        super().__init__(quiet=quiet)
        self._what, self._left, self._done = what, Counter(weights), 0
        self._total = self._left.total()
        self._took: defaultdict[int, list[float]] = defaultdict(list)
        self._since = time.monotonic()

    def update(self, weight: int) -> None:
        """Show that one more result, of this weight, is there."""
        now = time.monotonic()
        self._took[weight].append(now - self._since)
        self._since = now
        self._left[weight] -= 1
        self._done += 1
        left = clock(self.seconds_left)
        line = f"{self._what}: {self._done:,} of {self._total:,}, about {left} left"
        self._show(line, self._done, self._total, line)

    @property
    def seconds_left(self) -> float:
        """Seconds that the others will take, if each takes as long as those of its weight."""
        means = {weight: sum(took) / len(took) for weight, took in self._took.items()}
        share = sum(means.values()) / sum(means)
        return sum(left * means.get(weight, share * weight) for weight, left in self._left.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationJob:
    """Everything the options said.

    Attributes:
        given: Values of the options; None where an option was not given.
        loading: How to load the model, besides what was asked.
        folder: Where the results go; None names a new folder after the time.
        resume: Whether to go on with the folder.
        force: Whether the results in the folder may be replaced.
        output: The document on stdout, and the figure.
    """

    given: Mapping[str, Any]
    loading: Mapping[str, Any]
    folder: Path | None
    resume: bool
    force: bool
    output: Output

    def run(self) -> None:
        """Evaluate what is not there yet, and show everything.

        Raises:
            SfiError: What the user can mend.
            typer.Exit: With 130 after Ctrl-C.
        """
        if self.resume and self.folder is None:
            raise ConfigError("resume must come with --output DIR, got none")
        with self.output:
            results = self._results()
            document = document_of(results)
            self.output.show(document, evaluation_text)
            if document["rows"]:
                from sfi_traces.results.evaluation.plots import write_plot

                self.output.figure(write_plot, document)
        if results.manifest["stopped"]:
            leave_interrupted(f"interrupted; go on with: sfi eval -o {results.path} --resume")
        self.output.say(f"Wrote {results.path}")

    def _results(self) -> Any:
        # open the folder, and run what is not in it yet
        from sfi_traces.results.evaluation.store import ResultsFolder, check_new

        path = self.folder or dated_folder("sfi-eval")
        results = None
        if self.resume:
            results = ResultsFolder.resume(path)
            asked = resumed(self.given, results.manifest["asked"])
        else:
            check_new(path, force=self.force)
            asked = filled(self.given)
        if self.output.plot is not None and not asked["tasks"]:
            raise ConfigError("plot shows scores and must come with --task, got none")
        text = _text(asked["fidelity"])
        parts = parts_of(asked, text)
        facts = {
            "asked": dict(asked),
            "methods": plain(described(methods_of(asked))),
            "text": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        }
        if results is not None:
            for name in ("methods", "text"):
                check_same(name, facts[name], results.manifest[name])
            if results.manifest["finished"] and not any(_left(part, results) for part in parts):
                return results
        model, tokenizer = self._loaded(asked)
        for part in parts:
            part.check(model, tokenizer)
        facts |= _facts(model)
        if results is None:
            results = ResultsFolder.create(path, facts, force=self.force)
        else:
            check_same("model", facts["model"], results.manifest["model"])
        self._run(results, parts, model, tokenizer, asked)
        return results

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
        parts: list[Any],
        model: Any,
        tokenizer: Any,
        asked: Mapping[str, Any],
    ) -> None:
        options = {
            "backend": asked["backend"], "prefill_chunk": asked["prefill_chunk"],
            "engine": engine_of(asked),
        }  # fmt: skip
        stopped: str | None = "interrupted"
        try:
            results.forget_failures()
            for part in parts:
                left = _left(part, results)
                done = set(part.keys) - set(left)
                with EvaluationProgress(
                    part.table, map(part.weight, left), quiet=self.output.quiet
                ) as shown:
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
            results.close(stopped)


def document_of(results: Any) -> dict[str, Any]:
    """Sum results up as the document of `--json`."""
    from sfi_traces.results.evaluation.summary import (
        summarize,
        summarize_fidelity,
        summarize_harness,
    )

    manifest = results.manifest
    names = ("asked", "model", "device", "machine", "versions", "created", "finished", "stopped")
    return {
        "results": str(results.path),
        **{name: manifest[name] for name in names},
        "rows": summarize(results.rows["samples"]),
        "fidelity": summarize_fidelity(results.rows["fidelity"]),
        "harness": summarize_harness(results.rows["harness"]),
        "samples": str(results.path / "samples.jsonl"),
    }


def check_same(what: str, got: Any, wanted: Any) -> None:
    """Refuse to go on with another model or other methods.

    Raises:
        ConfigError: With what differs.
    """
    if got == wanted:
        return
    if isinstance(got, list) and len(got) == len(wanted):
        got, wanted = next((a, b) for a, b in zip(got, wanted, strict=True) if a != b)
    if isinstance(got, dict):
        names = [name for name in wanted if got.get(name) != wanted[name]]
        got, wanted = ({name: one.get(name) for name in names} for one in (got, wanted))
    raise ConfigError(
        f"resume must keep the folder's {what} {json.dumps(wanted)}, got {json.dumps(got)}"
    )


def plain(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    return json.loads(json.dumps(value))


def _facts(model: Any) -> dict[str, Any]:
    # what a results folder says of the model and the machine
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


def _left(part: Any, results: Any) -> list[Any]:
    # keys of the rows that are not there, or failed
    done = {part.key(row) for row in results.rows[part.table] if row["error"] is None}
    return [key for key in part.keys if key not in done]


def clock(seconds: float) -> str:
    """Write seconds for a person."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
