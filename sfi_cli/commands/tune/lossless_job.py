"""What `sfi tune --lossless` does between its options and its output."""

from dataclasses import fields
from functools import partial
from typing import Any

from sfi_cli.commands.tune.job import TuneJob
from sfi_cli.commands.tune.lossless_views import lossless_tune_text
from sfi_cli.parsing import named_strings
from sfi_cli.settings.tables import TRIALS, TuneTable
from sfi_cli.terminal.output import leave_interrupted
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import ConfigError


class LosslessTuneJob(TuneJob):
    """Everything the options said; most options of the study have no part in it."""

    def run(self) -> None:
        """Predict every setting, confirm, show and write.

        Raises:
            SfiError: What the user can mend.
            typer.Exit: With 130 after Ctrl-C.
        """
        self._check()
        self.confirming.check()
        with self.output:
            try:
                self._run()
            except KeyboardInterrupt:
                leave_interrupted()

    def _check(self) -> None:
        own, plain = self.searching, TuneTable()
        path = self.output.path
        study = path is not None and own.study != path.with_suffix(".journal")
        given = {
            "objective": own.objectives,
            "min-retained": own.min_retained is not None,
            "max-read": own.max_read is not None,
            "trials": own.trials != TRIALS,
            "seed": own.seed,
            "study": study,
            "resume": own.resume,
            "plot": self.output.plot,
        } | {
            f"tune.{one.name}": getattr(own.settings, one.name) != getattr(plain, one.name)
            for one in fields(plain)
            if one.name != "batch_size"
        }
        for name, said in given.items():
            if said:
                raise ConfigError(f"{name} must come without --lossless, got both")

    def _run(self) -> None:
        from sfi_traces.read.reader import Trace
        from sfi_traces.tune.lossless.found import LosslessFound
        from sfi_traces.tune.lossless.search import LosslessTuning

        tuning = LosslessTuning.of(
            [Trace.open(path) for path in self.traces],
            axes=self.axes,
            trigger_sets=named_strings(self.trigger_sets),
            batch=self.searching.settings.batch_size,
        )
        with BenchProgress(quiet=self.output.quiet) as progress:
            # loads the model before the search: a mistake shows before the work
            confirm = self._runs(tuning, progress) if self.confirming.count else None
            candidates = tuning.search(partial(progress.update, "searching"))
            found = LosslessFound(tuning=tuning, candidates=candidates)
            if confirm is not None:
                found = found.confirm(confirm, self.confirming.count)
        self.output.show(found.document(), lossless_tune_text)
        self.output.text(found.toml())

    def _runs(self, tuning: Any, progress: BenchProgress) -> Any:
        from sfi_traces.tune.confirm import Material
        from sfi_traces.tune.lossless.confirm import LosslessConfirmer, trace_material

        own = self.confirming
        model, tokenizer = own.load(tuning.traces)
        if own.has_prompts:
            material = [Material.of_texts(own.texts(), tokenizer)]
        else:
            material = []
            for trace in tuning.traces:  # two traces of one prompt need one run
                one = trace_material(trace)
                material += [one] if one not in material else []
        return LosslessConfirmer(
            model=model,
            tokenizer=tokenizer,
            policy=tuning.traces[0].manifest["policy"],
            costs=tuning.costs,
            material=material,
            backend=own.engine.backend,
            prefill_chunk=own.engine.prefill_chunk,
            engine=own.engine.options,
            on_run=partial(progress.update, "confirming"),
        )
