"""The run of the benchmark: at every point the variants take turns, repeatedly, in one process."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from sfi_core.engine.attend import check_backend
from sfi_core.errors import BackendError, ConfigError, MemoryForecastError
from sfi_core.hosts.transformers.shapes import cached_shapes
from sfi_core.hosts.transformers.slow_fast import session_on
from sfi_core.hosts.transformers.stores import check_able
from sfi_core.machine.memory import describe_measured, free_bytes, give_back, resident_bytes
from sfi_core.machine.private import attention_implementation
from sfi_core.machine.versions import versions
from sfi_core.measure.bench import ours, theirs
from sfi_core.measure.bench.rows import pays_from, point_rows
from sfi_core.measure.bench.runs import BenchRow, DecodeSample, DecodeVariant, Prompts, variants
from sfi_core.measure.bench.settings import DecodeSettings, Point
from sfi_core.measure.kernel_bench.timing import clock_for, copy_gb_per_s
from sfi_core.models.describe import ModelWeights, describe_model
from sfi_core.policies import policy_class
from sfi_core.sizes.memory import largest_batch
from sfi_core.sizes.step import ByteModel
from sfi_core.state.layer_pages import LayerShape

Progress = Callable[[str, int, int], None]
STATED = (
    "lossless rows: acceptance is stated, {:g} for each tested token, and does not depend on the drafts; "
    "the tokens mean nothing"
)
# settings in the document
SHOWN = ("steps", "warm_up", "repeats", "ragged", "acceptance", "seed")
ENGINE = ("backend", "overlap", "graphs", "kv_dtype", "kv_device_budget", "kv_page")


def run_bench(
    model: Any,
    settings: DecodeSettings,
    progress: Progress = lambda *_: None,
    on_run: Callable[[str], None] = lambda _: None,
) -> "Bench":
    """Measure every point; after Ctrl-C, return the rows measured until then.

    `progress` gets the phase, the runs done and their number; `on_run` a line for each run. Raise `MemoryForecastError`
    if no variant fits at any point, `ConfigError` for a batch that lossless runs cannot decode, and as `slow_fast`.
    """
    check_run(settings, model.device)
    bench = Bench(model, settings, progress, on_run)
    try:
        bench.run()
    except KeyboardInterrupt:
        bench.interrupted = True
    if not bench.rows and bench.skipped and not bench.interrupted:
        least = min(bench.skipped, key=lambda row: row["needed_bytes"])
        raise MemoryForecastError(
            f"the benchmark must fit {least['free_bytes'] / 1e9:.2f} GB of free memory, got at least "
            f"{least['needed_bytes'] / 1e9:.2f} GB ({least['policy']}, context {least['context']}, batch "
            f"{least['batch']}; batch {least['largest_batch']} fits); lower contexts or batches"
        )
    return bench


def check_run(settings: DecodeSettings, device: torch.device) -> None:
    """Refuse, before a large model loads, a backend, graphs, a policy or lossless runs that cannot run here."""
    drafts = [policy_class(policy).drafts for policy in settings.policies]
    if settings.lossless and not any(drafts):
        check_able(policy_class(settings.policies[0]), settings.policies[0], "drafts")
    check_backend(settings.engine.backend, device, settings.engine)
    if settings.engine.graphs and device.type != "cuda":
        raise BackendError(f"graphs must run on a CUDA device, got {device.type}; drop engine.graphs")


def release(device: torch.device) -> None:
    """Free the memory of the last run: caches in reference cycles, and PyTorch's cached blocks."""
    gc.collect()
    give_back(device)


@dataclass(slots=True)
class Bench:
    """A benchmark, and its measurements so far: rows of measured and of skipped variants and points."""

    model: Any
    settings: DecodeSettings
    progress: Progress = lambda *_: None
    on_run: Callable[[str], None] = lambda _: None
    about: dict[str, Any] = field(default_factory=dict)  # the description of the model
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # remarks that the rows need
    interrupted: bool = False  # whether Ctrl-C ended the run early
    _shapes: list[LayerShape] = field(default_factory=list)
    _done: int = 0
    _total: int = 0

    def run(self) -> None:
        """Measure the machine, then every point."""
        model, settings = self.model, self.settings
        self.progress("measuring the copy bandwidth", 0, 0)
        copy = copy_gb_per_s(model.device, clock_for(model.device, "torch"))
        self.machine = {**describe_measured(model.device), "copy_gb_per_s": copy}
        with session_on(model, None, replace(settings.config, trigger_policy="never")) as session:
            self._shapes = session.shapes()
            if settings.lossless and session.most_together == 1 < max(settings.batches):
                raise ConfigError(
                    f"batch must be 1 in lossless runs of a model with states, got {max(settings.batches)}"
                )
        weights = ModelWeights.of(model)
        self.about = {**describe_model(model, self._shapes), "total_weight_bytes": weights.total_bytes}
        self.notes += self._notes()
        points, ways = settings.points(), variants(settings)
        self._total = len(points) * len(ways) * settings.repeats
        for point in points:
            self._measure(point, ways)

    def _measure(self, point: Point, ways: list[DecodeVariant]) -> None:
        settings, model = self.settings, self.model
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        release(model.device)
        fitting = self._fitting(ways, point)
        self._done += (len(ways) - len(fitting)) * settings.repeats
        if not fitting:
            return
        prompts = Prompts.of(settings, point, vocabulary, model.device)
        rows = [
            BenchRow(model, variant, point, settings, prompts, self._byte_model(variant, point.batch), needed)
            for variant, needed in fitting.items()
        ]
        before = len(self.rows)
        try:
            for repeat in range(settings.repeats):
                for row in rows:
                    label = f"{row.variant.name}, {point.context:,} tokens x {point.batch}, repeat {repeat + 1}"
                    self._show(label, None)
                    row.on_step = partial(self._show, label)
                    row.samples.append(self._run(row))
                    self._done += 1
                    self.on_run(f"{label}: {row.samples[-1].decode_rate:,.2f} tokens/s")
        finally:
            self.rows[before:] = point_rows(rows, self.machine["copy_gb_per_s"])

    def _fitting(self, ways: list[DecodeVariant], point: Point) -> dict[DecodeVariant, int]:
        # the bytes that each variant needs that fits into free memory, before a cache is allocated; others are skipped
        free = free_bytes(self.model.device)
        fitting: dict[DecodeVariant, int] = {}
        for variant in ways:
            needed = self._needed(variant, point, point.batch)
            if free is None or needed <= free:
                fitting[variant] = needed
                continue
            largest = largest_batch(partial(self._needed, variant, point), point.batch - 1, free)
            row = {"policy": variant.name, "context": point.context, "batch": point.batch}
            self.skipped.append(row | {"needed_bytes": needed, "free_bytes": free, "largest_batch": largest})
        return fitting

    def _needed(self, variant: DecodeVariant, point: Point, batch: int) -> int:
        sized = replace(point, batch=batch)
        if variant.policy:
            return ours.needed_bytes(self.model, variant, sized, self.settings)
        return theirs.needed_bytes(self.model, variant.name, sized, self.settings)

    def _run(self, row: BenchRow) -> DecodeSample:
        model, policy, made_up = self.model, row.variant.policy, row.prompts.made_up
        release(model.device)
        free = free_bytes(model.device)
        if not policy and free is not None and row.needed_bytes > free:
            made_up.drop()  # our next run fills the made-up cache again
            release(model.device)
        resident = resident_bytes(model.device)
        if policy:
            resident -= made_up.held_bytes  # the forecast counts these pages
        sample = ours.run_ours(row) if policy else theirs.run_theirs(row)
        sample.forecast_bytes = resident + row.needed_bytes
        sample.stopped = sample.tokens < row.point.batch * self.settings.steps
        return sample

    def _show(self, label: str, sample: DecodeSample | None) -> None:
        rate = f": {sample.decode_rate:,.2f} tokens/s" if sample and sample.steps else ""
        self.progress(label + rate, self._done, self._total)

    def _byte_model(self, variant: DecodeVariant, batch: int) -> ByteModel:
        shapes = self._shapes if variant.policy else cached_shapes(self.model)
        dense_layers = self.settings.config.dense_layers if variant.policy else ()
        weights = {"weight_bytes": ModelWeights.of(self.model).read(batch)}
        return ByteModel.of(describe_model(self.model, shapes) | weights, dense_layers=dense_layers, batch=batch)

    def _notes(self) -> list[str]:
        settings, device = self.settings, self.model.device.type
        notes = [] if settings.acceptance is None else [STATED.format(settings.acceptance)]
        if settings.baselines:
            notes.append(
                "transformers: greedy model.generate on the same model with an attention implementation of "
                f"its own choice ({attention_implementation(self.model.config)})"
            )
        if device == "cuda" and "transformers-static" in settings.baselines:
            notes.append("transformers compiles the forward pass with its static cache by itself")
        notes.append("caches are filled with random keys and values; our policies decode given tokens")
        whole = [
            variant.name for variant in variants(settings)
            if variant.policy and variant.engine.kv_device_budget != settings.engine.kv_device_budget
        ]  # fmt: skip
        if whole:
            notes.append(f"{', '.join(whole)}: all keys and values on the device, without kv_device_budget")
        limit = self.about["max_positions"]
        if limit is not None and max(settings.contexts) + settings.total_steps > limit:
            notes.append(f"contexts exceed the model's {limit:,} positions: for timing only")
        return notes

    def document(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        settings = self.settings
        return {
            "rows": self.rows,
            "pays_from": pays_from(self.rows),
            "skipped": self.skipped,
            "interrupted": self.interrupted,
            "notes": [*self.notes, *self._eager_notes()],
            "model": self.about,
            "settings": {
                "time_limit_seconds": settings.time_limit,
                "slow_rate": str(settings.slow_rate),
                **{name: getattr(settings, name) for name in SHOWN},
                **{name: getattr(settings.engine, name) for name in ENGINE},
                "config": settings.config.to_dict(),
            },
            "date": datetime.now(UTC).date().isoformat(),
            "machine": self.machine,
            "versions": versions(),
        }

    def _eager_notes(self) -> list[str]:
        by_reason: dict[str, list[str]] = {}
        for row in self.rows:
            for name, how in (("not_replayed", "one kernel after the other"), ("not_compiled", "module by module")):
                if row[name]:
                    by_reason.setdefault(f"steps ran {how}: {row[name]}", []).append(row["policy"])
        return [f"{', '.join(dict.fromkeys(policies))}: {reason}" for reason, policies in by_reason.items()]
