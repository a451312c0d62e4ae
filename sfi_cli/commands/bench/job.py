"""`sfi bench` after its options are read."""

from fractions import Fraction
from typing import Any

from sfi_cli.options import Subject
from sfi_cli.parsing import numbers, words
from sfi_cli.settings import ForecastTable, Given
from sfi_cli.terminal.output import Output, View, leave_interrupted
from sfi_cli.terminal.progress import Progress
from sfi_core.errors import ConfigError
from sfi_core.settings.engine import EngineOptions

FORMATS = (".json",)
KILO = 1024
SLOW_RATE = "1/20"
CPU_SECONDS = 2.0  # default time limit of a run on a CPU, where a step may take seconds
TIERS = ("engine.kv_device_budget", "engine.kv_page")


def run(
    subject: Subject,
    settings: Given,
    asked: dict[str, Any],
    output: Output,
    *,
    slow_rate: str | None,
    threads: int | None,
    forecast: bool,
) -> None:
    """Load the model, measure or forecast, write and show the result.

    `asked` has fields of `DecodeSettings`, None for a default.
    """
    import torch

    from sfi_core.engine.attend import check_backend
    from sfi_core.measure.bench.bench import check_engine
    from sfi_core.models.load import resolve_device

    subject.check()
    if threads is not None and threads <= 0:
        raise ConfigError(f"threads must be positive, got {threads}")
    _check_forecast(settings, asked["acceptance"], forecast=forecast)
    if threads is not None:
        torch.set_num_threads(threads)

    device = resolve_device(subject.loading["device"])
    if device.type == "cpu" and asked["time_limit"] is None:
        asked["time_limit"] = CPU_SECONDS
    checked = _settings(settings, asked, slow_rate)
    check_backend(checked.engine.backend, device)  # report mistakes before a large model loads
    check_engine(checked, device)
    output.check_format(FORMATS)
    with output:
        if forecast:
            _forecast(subject, checked, device, settings.table(ForecastTable), output)
        else:
            _measure(subject, checked, output)


def _measure(subject: Subject, settings: Any, output: Output) -> None:
    from sfi_cli.commands.bench.views import bench_text
    from sfi_core.measure.bench.bench import run_bench

    output.say(f"loading {subject.name}")
    model, _ = subject.loaded()
    with Progress(quiet=output.quiet) as progress:
        result = run_bench(model, settings, progress.update, output.say)
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


def _check_forecast(settings: Given, acceptance: float | None, *, forecast: bool) -> None:
    if not forecast:
        for name in sorted(settings.said):
            if name.startswith("forecast."):
                raise ConfigError(f"{name} must come with --forecast, got it alone")
        return
    for name in TIERS:
        if name in settings.said:
            raise ConfigError(f"{name} must come without --forecast")
    if acceptance is not None:
        raise ConfigError("acceptance must come without --forecast")


def _settings(settings: Given, asked: dict[str, Any], slow_rate: str | None) -> Any:
    from sfi_core.measure.bench.settings import DecodeSettings

    given = {name: value for name, value in asked.items() if value is not None}
    given |= {"config": settings.config, "engine": settings.table(EngineOptions)}
    return DecodeSettings(**given, **settings.of("bench"), slow_rate=_rate(slow_rate or SLOW_RATE))


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
