"""Runs tuned settings for real, and compares the predictions with the runs' own audits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pyarrow.compute as pc

from sfi_core.bundled.example import load_example
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.errors import TraceError
from sfi_core.generation.generate import generate, read_prompt
from sfi_core.hosts.transformers.slow_fast import session_on
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.models.describe import describe_model
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DEFAULTS, AuditConfig, EngineOptions, Sampling
from sfi_traces.model.trace import Trace
from sfi_traces.record.parquet import ParquetObserver
from sfi_traces.replay import Supports
from sfi_traces.replay.measured import Steps, compare_steps, pooled
from sfi_traces.tune.result import Confirmation
from sfi_traces.tune.tuning import Tuning


def check_model(model: Any, tokenizer: Any, trace: Trace) -> None:
    """Raise `TraceError` for a model that the trace was not recorded with; names the fact that differs."""
    with session_on(model, tokenizer, SfiConfig(trigger_policy="never")) as session:
        facts = describe_model(model, session.shapes())
    for name, value in trace.manifest["model"].items():
        if facts.get(name) != value:
            brief = isinstance(value, str | int)
            raise TraceError(
                f"trace {trace.path} must be of the model that --model names, got "
                + (f"{name} {value} there and {facts.get(name)} here" if brief else f"other {name}")
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A trace's prompts, `rows` of token ids, and its supports to predict from.

    `expected` is the right answer of the only request; None if unknown.
    """

    trace: Trace
    recorded: Sequence[Supports]
    rows: list[list[int]]
    expected: str | None

    @classmethod
    def of_trace(cls, trace: Trace, recorded: Sequence[Supports], tokenizer: Any) -> Self:
        """Read the prompts; raises `TraceError` if the trace has none."""
        table = trace.table("prompts", ["request", "position", "token_id"]).sort_by(
            [("request", "ascending"), ("position", "ascending")]
        )
        if not len(table) or table["token_id"].null_count:
            raise TraceError(f"trace {trace.path} has no prompts to run again")
        rows = [
            table.filter(pc.field("request") == request)["token_id"].to_pylist()
            for request in pc.unique(table["request"]).to_pylist()
        ]
        example = load_example()
        is_example = rows == [tokenizer(example.prompt)["input_ids"]]
        return cls(trace=trace, recorded=recorded, rows=rows, expected=example.answer if is_example else None)


@dataclass(slots=True)
class Tally:
    """Results of one setting's runs."""

    steps: list[Steps] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    agreements: list[bool] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    exact: list[bool] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def confirmation(self) -> Confirmation:
        """Sum the runs up."""
        compared = len(self.divergences)
        return Confirmation(
            comparison=pooled(self.steps),
            kl_next_token=sum(self.divergences) / compared if compared else None,
            argmax_agreement=sum(self.agreements) / compared if compared else None,
            decode_tokens_per_second=self.speed,
            exact_match=all(self.exact) if self.exact else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmer:
    """Runs settings for real on the prompts of traces; full attention without the engine's device budget."""

    model: Any
    tokenizer: Any
    material: Sequence[Material]
    top: int = AuditConfig().top  # positions of an audited support
    engine: EngineOptions = DEFAULTS

    @classmethod
    def of(cls, tuning: Tuning, model: Any, tokenizer: Any, engine: EngineOptions) -> Self:
        """Take a tuning's traces; raises `TraceError` for those of another model, or without prompts."""
        for trace in tuning.traces:
            check_model(model, tokenizer, trace)
        pairs = zip(tuning.traces, tuning.recorded, strict=True)
        material = [Material.of_trace(*pair, tokenizer) for pair in pairs]
        top = min(request.top for request in tuning.requests)
        return cls(model=model, tokenizer=tokenizer, material=material, top=top, engine=engine)

    def __call__(
        self,
        configs: Sequence[SfiConfig],
        policies: Sequence[str],
        on_run: Callable[[int, int], None] = lambda *_: None,
    ) -> tuple[list[Confirmation], float]:
        """Run at least one setting, each with its policy: once audited, once more for its speed.

        Before each run `on_run` is told how many are done, and of how many. Returns the settings' confirmations, and
        full attention's tokens per second. Raises KeyboardInterrupt for Ctrl-C, `SfiError` if a run failed.
        """
        tallies, dense = [Tally() for _ in configs], Tally()
        total, done = len(self.material) * (len(configs) + 1), 0
        for prompts in self.material:
            capacity = max(map(len, prompts.rows)) + max(request.steps for request in prompts.recorded)
            window = max(config.window_prefill for config in configs)
            shared = read_prompt(
                self.model, self.tokenizer, prompts.rows, capacity=capacity, window=window, engine=self.engine
            )
            on_run(done, total)
            self._timed(prompts, configs[0], "full-kv", shared, dense)
            for config, policy, tally in zip(configs, policies, tallies, strict=True):
                done += 1
                on_run(done, total)
                self._audited(prompts, config, policy, shared, tally)
                self._timed(prompts, config, policy, shared, tally)
            done += 1
        return [tally.confirmation() for tally in tallies], dense.speed

    def _audited(self, prompts: Material, config: SfiConfig, policy: str, shared: SharedPrompt, tally: Tally) -> None:
        with TemporaryDirectory() as parent:
            folder = Path(parent) / "run"
            with ParquetObserver(folder, tokenizer=self.tokenizer) as observer:
                audit = AuditConfig(every=1, top=self.top)
                self._run(prompts, config, policy, shared, observers=[observer], audit=audit)
            real = Trace.open(folder)
            tally.steps += compare_steps(prompts.recorded, prompts.trace, real)
            logits = real.table("logits", ["kl_next_token", "argmax_agrees"])
        tally.divergences += logits["kl_next_token"].to_pylist()
        tally.agreements += logits["argmax_agrees"].to_pylist()

    def _timed(self, prompts: Material, config: SfiConfig, policy: str, shared: SharedPrompt, tally: Tally) -> None:
        result = self._run(prompts, config, policy, shared)
        tally.tokens += sum(max(0, len(request.token_ids) - 1) for request in result.report.requests)
        tally.seconds += result.report.decode_seconds
        if prompts.expected is not None:
            tally.exact.append(result.texts == [prompts.expected])

    def _run(self, prompts: Material, config: SfiConfig, policy: str, shared: SharedPrompt, **watched: Any) -> Any:
        manifest = prompts.trace.manifest
        result = generate(
            self.model, self.tokenizer, prompts.rows, config, policy=policy,
            max_new_tokens=max(request.steps for request in prompts.recorded),
            sampling=Sampling(**(manifest.get("sampling") or {})), seed=manifest.get("seed") or 0, shared=shared,
            engine=engine_for(policy, self.engine), **watched,
        )  # fmt: skip
        if result.interrupted:
            raise KeyboardInterrupt
        if result.error is not None:
            raise result.error
        return result
