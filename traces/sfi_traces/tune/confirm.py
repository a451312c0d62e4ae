"""Runs tuned settings for real, and compares the predictions with the runs' own audits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.compute as pc

from sfi_core.bundled.example import load_example
from sfi_core.engine.attend import check_backend
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.errors import TraceError
from sfi_core.generation.generate import generate, read_prompt
from sfi_core.hosts.transformers.slow_fast import session_on
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.models.describe import describe_model
from sfi_core.models.load import load, resolve_device
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DEFAULTS, AuditConfig, EngineOptions, Sampling
from sfi_traces.model.trace import Trace
from sfi_traces.record.parquet import ParquetObserver
from sfi_traces.replay import Supports
from sfi_traces.replay.measured import Steps, compare_steps, pooled
from sfi_traces.tune.front import Confirmation
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


def prompt_rows(trace: Trace) -> list[list[int]]:
    """Read the token ids of a trace's prompts; raises `TraceError` if it has none."""
    table = trace.table("prompts", ["request", "position", "token_id"]).sort_by(
        [("request", "ascending"), ("position", "ascending")]
    )
    if not len(table) or table["token_id"].null_count:
        raise TraceError(f"trace {trace.path} has no prompts to run again")
    return [
        table.filter(pc.field("request") == request)["token_id"].to_pylist()
        for request in pc.unique(table["request"]).to_pylist()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A trace's prompts, to run settings on.

    Attributes:
        recorded: The supports to predict from.
        rows: Token ids of each request.
        expected: The right answer of the only request; None if unknown.
    """

    trace: Trace
    recorded: Sequence[Supports]
    rows: list[list[int]]
    sampling: dict[str, Any]
    seed: int
    max_new_tokens: int
    expected: str | None

    @classmethod
    def of_trace(cls, trace: Trace, recorded: Sequence[Supports], tokenizer: Any) -> "Material":
        """Take a trace's own prompts, to be run as they were recorded; raises `TraceError` if it has none."""
        rows = prompt_rows(trace)
        example = load_example()
        is_example = rows == [tokenizer(example.prompt)["input_ids"]]
        return cls(
            trace=trace,
            recorded=recorded,
            rows=rows,
            sampling=trace.manifest.get("sampling") or {},
            seed=trace.manifest.get("seed") or 0,
            max_new_tokens=max(request.steps for request in recorded),
            expected=example.answer if is_example else None,
        )


@dataclass(slots=True)
class Tally:
    """Results of one setting's runs, over all material."""

    steps: list[Steps] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    agreements: list[bool] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    exact: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmer:
    """Runs settings for real.

    Attributes:
        top: Positions of an audited support.
        engine: How prompts are read and steps are run; full attention runs without its device budget.
    """

    model: Any
    tokenizer: Any
    top: int = AuditConfig().top
    engine: EngineOptions = DEFAULTS

    def __call__(
        self,
        material: Sequence[Material],
        configs: Sequence[SfiConfig],
        policies: Sequence[str],
        on_run: Callable[[int, int], None] = lambda *_: None,
    ) -> tuple[list[Confirmation], float]:
        """Run at least one setting, each with its policy: once audited, once more for its speed.

        Before each run `on_run` is told how many are done, and of how many. Returns the settings'
        confirmations, and full attention's tokens per second.

        Raises KeyboardInterrupt for Ctrl-C, `SfiError` if a run failed.
        """
        tallies, dense = [Tally() for _ in configs], Tally()
        total, done = len(material) * (len(configs) + 1), 0
        for prompts in material:
            shared = read_prompt(
                self.model,
                self.tokenizer,
                prompts.rows,
                capacity=max(map(len, prompts.rows)) + prompts.max_new_tokens,
                window=max(config.window_prefill for config in configs),
                engine=self.engine,
            )
            on_run(done, total)
            self._timed(prompts, configs[0], "full-kv", shared, dense)
            for config, policy, tally in zip(configs, policies, tallies, strict=True):
                done += 1
                on_run(done, total)
                self._audited(prompts, config, policy, shared, tally)
                self._timed(prompts, config, policy, shared, tally)
            done += 1
        return [_confirmation(tally) for tally in tallies], _rate(dense)

    def _audited(self, prompts: Material, config: SfiConfig, policy: str, shared: SharedPrompt, tally: Tally) -> None:
        with TemporaryDirectory() as parent:
            folder = Path(parent) / "run"
            with ParquetObserver(folder, tokenizer=self.tokenizer) as observer:
                self._run(prompts, config, policy, shared, [observer], AuditConfig(every=1, top=self.top))
            real = Trace.open(folder)
            tally.steps += compare_steps(prompts.recorded, prompts.trace, real)
            logits = real.table("logits", ["kl_next_token", "argmax_agrees"])
        tally.divergences += logits["kl_next_token"].to_pylist()
        tally.agreements += logits["argmax_agrees"].to_pylist()

    def _timed(self, prompts: Material, config: SfiConfig, policy: str, shared: SharedPrompt, tally: Tally) -> None:
        result = self._run(prompts, config, policy, shared, [], None)
        tally.tokens += sum(max(0, len(r.token_ids) - 1) for r in result.report.requests)
        tally.seconds += result.report.decode_seconds
        if prompts.expected is not None:
            tally.exact.append(result.texts == [prompts.expected])

    def _run(
        self,
        prompts: Material,
        config: SfiConfig,
        policy: str,
        shared: SharedPrompt,
        observers: list[Any],
        audit: AuditConfig | None,
    ) -> Any:
        result = generate(
            self.model, self.tokenizer, prompts.rows, config, policy=policy, observers=observers, audit=audit,
            max_new_tokens=prompts.max_new_tokens, sampling=Sampling(**prompts.sampling), seed=prompts.seed,
            shared=shared, engine=engine_for(policy, self.engine),
        )  # fmt: skip
        if result.interrupted:
            raise KeyboardInterrupt
        if result.error is not None:
            raise result.error
        return result


def load_confirmer(
    tuning: Tuning, model: str | None, engine: EngineOptions, loading: Mapping[str, Any]
) -> Callable[..., tuple[list[Confirmation], float]]:
    """Load the model that the traces were recorded with; return what `TuneResult.confirm` runs settings by.

    The result calls its keyword `on_run` at each run; `loading` has further arguments of `load`. Raises `SfiError` if
    the model cannot be loaded, or is another one.
    """
    check_backend(engine.backend, resolve_device(loading["device"]))
    loaded, tokenizer = load(model, **loading)
    for trace in tuning.traces:
        check_model(loaded, tokenizer, trace)
    pairs = zip(tuning.traces, tuning.recorded, strict=True)
    material = [Material.of_trace(trace, recorded, tokenizer) for trace, recorded in pairs]
    top = min(request.top for request in tuning.evaluate.recorded)
    return partial(Confirmer(model=loaded, tokenizer=tokenizer, top=top, engine=engine), material)


def _confirmation(tally: Tally) -> Confirmation:
    known = [value for value in tally.divergences if value is not None]
    return Confirmation(
        comparison=pooled(tally.steps),
        kl_next_token=sum(known) / len(known) if known else None,
        argmax_agreement=sum(tally.agreements) / len(known) if known else None,
        decode_tokens_per_second=_rate(tally),
        exact_match=all(tally.exact) if tally.exact else None,
    )


def _rate(tally: Tally) -> float:
    return tally.tokens / tally.seconds if tally.seconds else 0.0
