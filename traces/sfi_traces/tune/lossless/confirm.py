"""Settings run for real in lossless runs, beside what was predicted of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sfi_core.generation.generate import generate
from sfi_core.hosts.transformers.decoder import nothing_to_tell
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DEFAULTS, EngineOptions
from sfi_core.settings.sampling import Sampling
from sfi_traces.read.reader import Trace
from sfi_traces.record.parquet import ParquetObserver
from sfi_traces.tune.confirm import Material, prompt_rows
from sfi_traces.tune.lossless.outcome import Costs, Outcome, recorded_outcome


def trace_material(trace: Trace) -> Material:
    """Take a trace's own prompts, as it was recorded.

    Raises:
        TraceError: It has no prompts.
    """
    steps = trace.table("steps", ["step"])["step"].to_pylist()
    return Material(
        trace=None,
        recorded=None,
        rows=prompt_rows(trace),
        sampling=trace.manifest.get("sampling") or {},
        seed=trace.manifest.get("seed") or 0,
        max_new_tokens=max(steps) + 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessConfirmer:
    """Runs settings for real.

    Attributes:
        model: A model of transformers.
        tokenizer: The model's tokenizer.
        policy: What drafts.
        costs: What a pass reads.
        material: Prompts, at least one.
        backend: "auto", "torch" or "triton".
        prefill_chunk: Prompt tokens of one forward pass.
        engine: How steps are run.
        on_run: Told before each run how many are behind us, and of how many.
    """

    model: Any
    tokenizer: Any
    policy: str
    costs: Costs
    material: Sequence[Material]
    backend: str = "auto"
    prefill_chunk: int = 0
    engine: EngineOptions = DEFAULTS
    on_run: Callable[[int, int], None] = nothing_to_tell

    def __call__(self, configs: Sequence[SfiConfig]) -> list[Outcome]:
        """Run each of some settings.

        Returns:
            What each did, over all material.

        Raises:
            KeyboardInterrupt: Ctrl-C.
            SfiError: The run failed.
        """
        found, total = [], len(configs) * len(self.material)
        for place, config in enumerate(configs):
            parts = []
            for number, one in enumerate(self.material):
                self.on_run(place * len(self.material) + number, total)
                parts.append(self._run(one, config))
            found.append(Outcome.sum(parts))
        return found

    def _run(self, one: Material, config: SfiConfig) -> Outcome:
        with TemporaryDirectory() as parent:
            folder = Path(parent) / "run"
            with ParquetObserver(folder, tokenizer=self.tokenizer) as observer:
                result = generate(
                    self.model, self.tokenizer, one.rows, config, policy=self.policy, lossless=True,
                    observers=[observer], max_new_tokens=one.max_new_tokens,
                    sampling=Sampling(**one.sampling), seed=one.seed, backend=self.backend,
                    prefill_chunk=self.prefill_chunk, engine=engine_for(self.policy, self.engine),
                )  # fmt: skip
            if result.interrupted:
                raise KeyboardInterrupt
            if result.error is not None:
                raise result.error
            return recorded_outcome(Trace.open(folder), self.costs)
