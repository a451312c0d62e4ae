"""`sfi bench` after its options are read."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from sfi_cli.loading import Subject
from sfi_cli.parsing import numbers, words
from sfi_cli.settings.tables import ForecastTable
from sfi_cli.terminal.output import Output, leave_interrupted
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import ConfigError, InputError

FORMATS = (".json", ".parquet")
BUNDLED_TEXT, NO_BASELINE, KILO = "bundled", "none", 1024
SLOW_RATE = "1/20"
TIERS = ("engine.kv_device_budget", "engine.kv_page")
TRIGGERS = ("t_max", "min_gap", "triggers", "trigger_policy", "stride", "slow_start")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBenchJob:
    """The options of `sfi bench`.

    Attributes:
        lists: Comma lists by field of `DecodeSettings`; None keeps the field's default.
        settings: Other fields of `DecodeSettings`; None keeps the field's default.
        said: Names of the settings that the user gave.
        slow_rate: A share such as 1/20; None for the default or with `text`.
        text: A file, or bundled; None without a text.
        threads: CPU threads; None for PyTorch's own.
        forecast: The machine to compute for; None measures on this machine.
    """

    subject: Subject
    lists: dict[str, list[str] | None]
    settings: dict[str, Any]
    said: frozenset[str]
    slow_rate: str | None
    text: str | None
    threads: int | None
    forecast: ForecastTable | None
    output: Output

    def run(self) -> None:
        """Load the model, measure or forecast, write and show the result."""
        import torch

        from sfi_core.engine.backends.registry import check_backend
        from sfi_core.measure.bench.bench import check_engine
        from sfi_core.models.load import resolve_device

        self._check_options()
        self._check_forecast()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device = resolve_device(self.subject.loading["device"])
        settings = self._settings(None)  # report mistakes before a large model loads
        check_backend(settings.engine.backend, device)
        check_engine(settings, device)
        if self.text is not None:
            _read_text(self.text)
        self.output.check_format(FORMATS)
        with self.output:
            if self.forecast is not None:
                self._forecast(settings, device, self.forecast)
            else:
                self._measure()

    def _measure(self) -> None:
        from sfi_cli.commands.bench.views import bench_text
        from sfi_core.measure.bench.bench import run_bench

        self.output.say(f"loading {self.subject.name}")
        model, tokenizer = self.subject.loaded(quiet=self.output.quiet)
        settings = self._settings((model, tokenizer))
        with BenchProgress(quiet=self.output.quiet) as progress:
            result = run_bench(model, settings, progress.update)
        document = result.document()
        document["model"]["name"] = self.subject.name
        document["model"]["packed_weights"] = self.subject.pack_weights
        if document["rows"]:
            self._write(document, bench_text)
        if result.interrupted:
            leave_interrupted()

    def _forecast(self, settings: Any, device: Any, machine: ForecastTable) -> None:
        from sfi_cli.commands.bench.views import forecast_text
        from sfi_core.measure.bench.byte_roofline import forecast_document
        from sfi_core.measure.bench.lossless_roofline import lossless_forecast_document

        model = self.subject.unloaded()
        sizes: dict[str, Any] = {
            "bandwidth_gb_per_s": machine.bandwidth,
            "memory_bytes": None if machine.memory is None else machine.memory * 1e9,
        }
        compute = lossless_forecast_document if settings.lossless else forecast_document
        document = compute(model, settings, device, **sizes)
        document["model"]["name"] = self.subject.name
        self._write(document, forecast_text)

    def _write(self, document: dict[str, Any], view: Callable[[dict[str, Any]], str]) -> None:
        from sfi_traces.results.bench import write_parquet, write_plot

        self.output.show(document, view)
        self.output.rows(document, write_parquet)
        self.output.figure(write_plot, document)

    def _check_options(self) -> None:
        self.subject.check()
        if self.text is not None and self.slow_rate is not None:
            raise ConfigError("slow_rate must come without --text, whose tokens decide")
        for name in TRIGGERS if self.text is None else ():
            if name in self.said:
                raise ConfigError(f"{name} must come with --text; without one --slow-rate decides")
        self._check_lossless()
        if self.threads is not None and self.threads <= 0:
            raise ConfigError(f"threads must be positive, got {self.threads}")

    def _check_lossless(self) -> None:
        lossless, acceptance = self.settings["lossless"], self.settings["acceptance"]
        if not lossless or acceptance is not None:
            return
        if self.text is None or self.subject.random_weights is not None:
            raise ConfigError(
                "lossless must come with --text and a checkpoint, whose acceptance is measured, or with "
                "--acceptance, which states one"
            )

    def _check_forecast(self) -> None:
        if self.forecast is None:
            for name in sorted(self.said):
                if name.startswith("forecast."):
                    raise ConfigError(f"{name} must come with --forecast, got it alone")
            return
        for name in TIERS:
            if name in self.said:
                raise ConfigError(f"{name} must come without --forecast")
        if self.text is not None:
            raise ConfigError("forecast needs a stated --slow-rate, got --text")

    def _settings(self, loaded: tuple[Any, Any] | None) -> Any:
        from sfi_core.measure.bench.settings import DecodeSettings

        given = {name: value for name, value in self.settings.items() if value is not None}
        for name, values in self.lists.items():
            if values:
                given[name] = _read_list(name, values)
        if given["lossless"] and given.get("acceptance") is None:
            given["prefill"] = (
                True  # acceptance is measured on real prompts, which must be prefilled
            )
        if self.text is None:
            return DecodeSettings(**given, slow_rate=_rate(self.slow_rate or SLOW_RATE))
        if loaded is None:
            return DecodeSettings(**given, slow_rate=None, text_ids=(0,))
        return DecodeSettings(**_with_text(given, self.text, *loaded))


def _read_list(name: str, values: list[str]) -> tuple[Any, ...]:
    if name in ("policies", "baselines"):
        named = words(values)
        return () if name == "baselines" and named == [NO_BASELINE] else tuple(named)
    return tuple(numbers(values, _count, f"{name} must be whole numbers such as 8192 or 8K"))


def _count(value: str) -> int:
    digits = value.lower().removesuffix("k")
    if not digits.isdecimal():
        raise ValueError(value)
    return int(digits) * (KILO if digits != value else 1)


def _rate(value: str) -> Fraction:
    try:
        return Fraction(value)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"slow_rate must be a share such as 1/20 or 0.05, got {value!r}"
        ) from error


def _with_text(given: dict[str, Any], source: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    from sfi_core.triggers.trigger_set import resolve_triggers

    # random weights have no tokenizer: take the bundled tokenizer's ids modulo the model's vocabulary
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = tokenizer(_read_text(source), add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(f"text {source} must have at least one token, got none")
    config = given["config"]
    triggers = sorted({token % vocabulary for token in resolve_triggers(tokenizer, config)})
    text_ids = tuple(token % vocabulary for token in ids)
    return {
        **given,
        "slow_rate": None,
        "text_ids": text_ids,
        "config": config.replace(trigger_token_ids=tuple(triggers)),
    }


def _read_text(source: str) -> str:
    from sfi_core.bundled.example import load_example

    if source == BUNDLED_TEXT:
        return load_example().prompt
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"text {source} cannot be read: {reason}") from error
