"""`sfi bench` after its options are read."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from sfi_cli.loading import Subject
from sfi_cli.parsing import numbers, read_text, words
from sfi_cli.settings.given import Given
from sfi_cli.settings.tables import ForecastTable
from sfi_cli.terminal.output import Output, View, leave_interrupted
from sfi_cli.terminal.progress import Progress
from sfi_core.errors import ConfigError, InputError
from sfi_core.settings.engine import EngineOptions

FORMATS = (".json",)
BUNDLED_TEXT, KILO = "bundled", 1024
SLOW_RATE = "1/20"
CPU_SECONDS = 2.0  # default time limit of a run on a CPU, where a step may take seconds
TIERS = ("engine.kv_device_budget", "engine.kv_page")
TRIGGERS = ("t_max", "min_gap", "triggers", "trigger_policy", "stride", "slow_start")
Loaded = tuple[Any, Any]  # a model and its tokenizer


def run(
    subject: Subject,
    settings: Given,
    asked: dict[str, Any],
    output: Output,
    *,
    slow_rate: str | None,
    text: str | None,
    threads: int | None,
    forecast: bool,
) -> None:
    """Load the model, measure or forecast, write and show the result.

    `asked` has fields of `DecodeSettings`, None for a default. `text` is a file or bundled; its tokens decide
    the slow steps in place of `slow_rate`.
    """
    import torch

    from sfi_core.engine.attend import check_backend
    from sfi_core.measure.bench.bench import check_engine
    from sfi_core.models.load import resolve_device

    subject.check()
    _check_text(settings, slow_rate, text)
    if threads is not None and threads <= 0:
        raise ConfigError(f"threads must be positive, got {threads}")
    _check_forecast(settings, text, asked["acceptance"], forecast=forecast)
    if threads is not None:
        torch.set_num_threads(threads)

    def made(loaded: Loaded | None) -> Any:
        return _settings(settings, asked, slow_rate, text, loaded)

    device = resolve_device(subject.loading["device"])
    if device.type == "cpu" and asked["time_limit"] is None:
        asked["time_limit"] = CPU_SECONDS
    early = made(None)
    check_backend(early.engine.backend, device)  # report mistakes before a large model loads
    check_engine(early, device)
    output.check_format(FORMATS)
    with output:
        if forecast:
            _forecast(subject, early, device, settings.table(ForecastTable), output)
        else:
            _measure(subject, made, output)


def _measure(subject: Subject, made: Callable[[Loaded], Any], output: Output) -> None:
    from sfi_cli.commands.bench.views import bench_text
    from sfi_core.measure.bench.bench import run_bench

    output.say(f"loading {subject.name}")
    loaded = subject.loaded(quiet=output.quiet)
    settings = made(loaded)
    with Progress(quiet=output.quiet) as progress:
        result = run_bench(loaded[0], settings, progress.update, output.say)
    document = result.document()
    document["model"]["weights"] = subject.loading["weights"]
    if document["rows"]:
        _write(subject, document, bench_text, output)
    if result.interrupted:
        leave_interrupted()


def _forecast(subject: Subject, settings: Any, device: Any, machine: ForecastTable, output: Output) -> None:
    from sfi_cli.commands.bench.views import forecast_text
    from sfi_core.measure.bench.byte_roofline import forecast_document

    document = forecast_document(
        subject.unloaded(), settings, device, bandwidth_gb_per_s=machine.bandwidth,
        memory_bytes=None if machine.memory is None else machine.memory * 1e9,
    )  # fmt: skip
    _write(subject, document, forecast_text, output)


def _write(subject: Subject, document: dict[str, Any], view: View, output: Output) -> None:
    from sfi_traces.results.plots import plot_bench

    document["model"]["name"] = subject.name
    output.show(document, view)
    output.file(document)
    output.figure(plot_bench, document)


def _check_text(settings: Given, slow_rate: str | None, text: str | None) -> None:
    if text is not None:
        if slow_rate is not None:
            raise ConfigError("slow_rate must come without --text, whose tokens decide")
        return
    for name in TRIGGERS:
        if name in settings.said:
            raise ConfigError(f"{name} must come with --text; without one --slow-rate decides")


def _check_forecast(settings: Given, text: str | None, acceptance: float | None, *, forecast: bool) -> None:
    if not forecast:
        for name in sorted(settings.said):
            if name.startswith("forecast."):
                raise ConfigError(f"{name} must come with --forecast, got it alone")
        return
    for name in TIERS:
        if name in settings.said:
            raise ConfigError(f"{name} must come without --forecast")
    if text is not None:
        raise ConfigError("forecast needs a stated --slow-rate, got --text")
    if acceptance is not None:
        raise ConfigError("acceptance must come without --forecast")


def _settings(
    settings: Given, asked: dict[str, Any], slow_rate: str | None, text: str | None, loaded: Loaded | None
) -> Any:
    from sfi_core.bundled.example import load_example
    from sfi_core.measure.bench.settings import DecodeSettings

    given = {name: value for name, value in asked.items() if value is not None}
    given |= {"config": settings.config, "engine": settings.table(EngineOptions)}
    given |= settings.of("bench")
    if text is None:
        return DecodeSettings(**given, slow_rate=_rate(slow_rate or SLOW_RATE))
    read = load_example().prompt if text == BUNDLED_TEXT else read_text(Path(text), "text")
    if loaded is None:
        return DecodeSettings(**given, slow_rate=None, text_ids=(0,))
    return DecodeSettings(**given | _of_text(text, read, given["config"], *loaded), slow_rate=None)


def names(values: list[str] | None, *, nothing: str | None = None) -> tuple[str, ...] | None:
    """Read comma lists of policies or baselines; None for the default, () for the word `nothing`."""
    if not values:
        return None
    listed = tuple(words(values))
    return () if listed == (nothing,) else listed


def counts(name: str, values: list[str] | None) -> tuple[int, ...] | None:
    """Read comma lists of whole numbers such as 8192 or 8K; None for the default."""

    def count(value: str) -> int:
        digits = value.lower().removesuffix("k")
        if not digits.isdecimal():
            raise ValueError(value)
        return int(digits) * (KILO if digits != value else 1)

    rule = f"{name} must be whole numbers such as 8192 or 8K"
    return tuple(numbers(values, count, rule)) if values else None


def _rate(value: str) -> Fraction:
    try:
        return Fraction(value)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"slow_rate must be a share such as 1/20 or 0.05, got {value!r}") from error


def _of_text(source: str, text: str, config: Any, model: Any, tokenizer: Any) -> dict[str, Any]:
    from sfi_core.triggers.trigger import resolve_triggers

    # random weights have no tokenizer: take the bundled tokenizer's ids modulo the model's vocabulary
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError(f"text {source} must have at least one token, got none")
    triggers = sorted({token % vocabulary for token in resolve_triggers(tokenizer, config)})
    return {
        "text_ids": tuple(token % vocabulary for token in ids),
        "config": config.replace(trigger_token_ids=tuple(triggers)),
    }
