"""`sfi tune` after its options are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sfi_cli.commands.generate.prompts import read_prompts
from sfi_cli.commands.tune.views import tune_text
from sfi_cli.parsing import named_strings, words
from sfi_cli.settings.tables import TuneTable
from sfi_cli.terminal.output import Output, leave_interrupted
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import ConfigError, InputError
from sfi_core.settings.engine import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Searching:
    """The options of the search.

    Attributes:
        objectives: Names of objectives; empty for the default ones.
        min_retained: Least mean retained mass.
        max_read: Largest share of the cached tokens read.
        trials: Trials of the study in all.
        study: The study's file.
        resume: Whether to continue a study that exists.
    """

    objectives: list[str]
    min_retained: float | None
    max_read: float | None
    trials: int
    seed: int
    study: Path
    resume: bool
    settings: TuneTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirming:
    """The options of the confirmation.

    Attributes:
        count: Settings to run for real.
        prompt_file: A file with a prompt; None for `batch` or the traces' own prompts.
        batch: A JSON Lines file of prompts; None without one.
        model: A hub id or folder; None for the bundled checkpoint.
        loading: Other arguments of `load`.
    """

    count: int
    prompt_file: Path | None
    batch: Path | None
    model: str | None
    engine: EngineOptions
    loading: dict[str, Any]

    @property
    def has_prompts(self) -> bool:
        """Whether the options name prompts."""
        return self.prompt_file is not None or self.batch is not None

    def load(self, traces: Sequence[Any]) -> tuple[Any, Any]:
        """Load the model and its tokenizer.

        Raises:
            SfiError: The model cannot be loaded, or is not the one that the traces were recorded with.
        """
        from sfi_core.engine.backends.registry import check_backend
        from sfi_core.models.load import load, resolve_device
        from sfi_traces.tune.confirm import check_model

        check_backend(self.engine.backend, resolve_device(self.loading["device"]))
        model, tokenizer = load(self.model, **self.loading)
        for trace in traces:
            check_model(model, tokenizer, trace)
        return model, tokenizer

    def texts(self) -> list[str]:
        """Read the prompts that the options name.

        Raises:
            InputError: The file has no prompts, or it has messages.
        """
        entries = read_prompts(None, self.prompt_file, self.batch).entries
        texts = [entry for entry in entries if isinstance(entry, str)]
        if len(texts) < len(entries):
            raise InputError(f"batch {self.batch} must hold prompts, got messages")
        return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """The options of `sfi tune`.

    Attributes:
        axes: Values or ranges by setting, as the user wrote them.
        trigger_sets: Each `NAME=A B C`.
    """

    traces: Sequence[Path]
    axes: dict[str, str]
    trigger_sets: list[str]
    searching: Searching
    confirming: Confirming
    output: Output

    def run(self) -> None:
        """Search, confirm, show the front and write the chosen settings; Ctrl-C keeps the study."""
        from sfi_traces.tune.storage import check_optuna, check_path

        check_optuna()
        check_path(self.searching.study, resume=self.searching.resume)
        if self.confirming.has_prompts and not self.confirming.count:
            raise ConfigError("prompt-file and batch must come with --confirm, got none")
        with self.output:
            self._run()

    def _run(self) -> None:
        from sfi_traces.tune.found import find
        from sfi_traces.tune.plot import write_plot

        tuning = self._tuning()
        confirm = self._confirmer(tuning) if self.confirming.count else None
        search = tuning.open(
            self.searching.study, seed=self.searching.seed, resume=self.searching.resume
        )
        trials = self.searching.trials
        with BenchProgress(quiet=self.output.quiet) as progress:
            found = find(
                tuning,
                search,
                trials,
                on_trial=lambda done: progress.update("searching", done, trials),
            )
        if confirm is not None and not found.interrupted:
            found = confirm(found)
        document = found.document()
        if found.front:
            self.output.show(document, tune_text)
        if found.interrupted:
            again = f"--study {self.searching.study} --resume"
            leave_interrupted(
                f"interrupted; the study is kept: go on with the same options and {again}"
            )
        self.output.figure(write_plot, document)
        self.output.text(found.toml())

    def _tuning(self) -> Any:
        from sfi_traces.model.trace import Trace
        from sfi_traces.tune.objective import Limits, objectives
        from sfi_traces.tune.tuning import Tuning

        limits = Limits(min_retained=self.searching.min_retained, max_read=self.searching.max_read)
        return Tuning.of(
            [Trace.open(path) for path in self.traces],
            axes=self.axes,
            trigger_sets=named_strings(self.trigger_sets),
            mining=self.searching.settings.mine,
            objectives=objectives(words(self.searching.objectives)),
            limits=limits,
        )

    def _confirmer(self, tuning: Any) -> Callable[[Any], Any]:
        # loads the model before the search, to report a mistake early
        from sfi_traces.tune.confirm import Confirmer, Material

        own = self.confirming
        model, tokenizer = own.load(tuning.traces)
        if own.has_prompts:
            material = [Material.of_texts(own.texts(), tokenizer)]
        else:
            pairs = zip(tuning.traces, tuning.recorded, strict=True)
            material = [Material.of_trace(trace, each, tokenizer) for trace, each in pairs]

        def confirm(found: Any) -> Any:
            with BenchProgress(quiet=self.output.quiet) as progress:
                confirmer = Confirmer(
                    model=model,
                    tokenizer=tokenizer,
                    top=min(one.top for one in tuning.evaluate.recorded),
                    engine=own.engine,
                    on_run=lambda done, total: progress.update("confirming", done, total),
                )
                try:
                    return found.confirm(partial(confirmer, material), own.count)
                except KeyboardInterrupt:
                    return replace(found, interrupted=True)

        return confirm
