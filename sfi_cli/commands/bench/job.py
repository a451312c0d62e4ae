"""`sfi bench` after its options are read."""

from fractions import Fraction
from typing import Any

from sfi_cli.loading import Subject
from sfi_cli.parsing import numbers, words
from sfi_cli.settings.given import Given
from sfi_cli.terminal.output import Output, leave_interrupted
from sfi_cli.terminal.progress import Progress
from sfi_core.errors import ConfigError
from sfi_core.settings.engine import EngineOptions

FORMATS = (".json",)
KILO = 1024
SLOW_RATE = "1/20"
CPU_SECONDS = 2.0  # default time limit of a run on a CPU, where a step may take seconds


def run(
    subject: Subject,
    settings: Given,
    asked: dict[str, Any],
    output: Output,
    *,
    slow_rate: str | None,
    threads: int | None,
) -> None:
    """Load the model, measure, write and show the result.

    `asked` has fields of `DecodeSettings`, None for a default.
    """
    import torch

    from sfi_cli.commands.bench.views import bench_text
    from sfi_core.engine.attend import check_backend
    from sfi_core.measure.bench.bench import check_engine, run_bench
    from sfi_core.models.load import resolve_device
    from sfi_traces.results.plots import plot_bench

    subject.check()
    if threads is not None and threads <= 0:
        raise ConfigError(f"threads must be positive, got {threads}")
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
        output.say(f"loading {subject.name}")
        model, _ = subject.loaded(quiet=output.quiet)
        with Progress(quiet=output.quiet) as progress:
            result = run_bench(model, checked, progress.update, output.say)
        document = result.document()
        document["model"] |= {"weights": subject.loading["weights"], "name": subject.name}
        if document["rows"]:
            output.show(document, bench_text)
            output.file(document)
            output.figure(plot_bench, document)
    if result.interrupted:
        leave_interrupted()


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
