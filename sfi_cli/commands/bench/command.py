"""`sfi bench`: tokens per second of decoding, or what to expect of them."""

from fractions import Fraction
from functools import partial
from typing import Annotated, Any

from sfi_cli import options as o
from sfi_cli.options import Subject
from sfi_cli.parsing import numbers, words
from sfi_cli.settings import TIERS, ForecastTable, Given, given
from sfi_cli.terminal.output import Output, leave_interrupted
from sfi_core.errors import ConfigError
from sfi_core.measure.bench.settings import DecodeSettings
from sfi_core.settings.engine import EngineOptions

RANDOM = "A config.json, or a name such as qwen3-4b or llama-3.1-8b: no checkpoint needed."
KILO = 1024
CPU_SECONDS = 2.0  # default time limit of a run on a CPU, where a step may take seconds
_more = partial(o.option, "Measurement")


def _field(name: str, text: str) -> Any:
    value = getattr(DecodeSettings(), name)
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else "none" if value is None else str(value)
    return _more(text, shown=shown)


def bench(
    policy: Annotated[o.Words, _field("policies", "Policies; comma list or repeated.")] = None,
    context: Annotated[o.Words, _field("contexts", "Cached tokens, 8192 or 8K; comma list or repeated.")] = None,
    batch: Annotated[o.Words, _field("batches", "Requests together; comma list or repeated.")] = None,
    baseline: Annotated[o.Words, _field("baselines", "What else takes turns; comma list, or none.")] = None,
    steps: Annotated[o.Number, _field("steps", "Decoding steps measured in each run.")] = None,
    repeats: Annotated[o.Number, _field("repeats", "Runs of each; all take turns.")] = None,
    time_limit: Annotated[o.Real, _more("Seconds of a run at most, after 3 steps.", shown="none; on a CPU 2")] = None,
    slow_rate: Annotated[o.Text, _field("slow_rate", "Share of steps that are slow: 1/20 or 0.05.")] = None,
    ragged: Annotated[bool, _more("Contexts of a batch fall evenly from the context to its half.", "--ragged")] = False,
    acceptance: Annotated[o.Real, _field("acceptance", "Lossless runs too, which keep this share of drafts.")] = None,
    seed: Annotated[int, _more("Seed of weights, keys, values and tokens.")] = 0,
    threads: Annotated[o.Number, _more("CPU threads.", shown="PyTorch's own")] = None,
    forecast: Annotated[bool, _more("Say what to expect, without weights and without running.", "--forecast")] = False,
    model: o.Model = None,
    random_weights: Annotated[o.Text, o.option(o.MODEL, RANDOM, shown="none")] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_device_budget: o.KvDeviceBudget = None,
    trust_remote_code: o.TrustRemoteCode = False,
    preset: o.Preset = None,
    config: o.Config = None,
    sets: o.Sets = None,
    budget: o.Budget = None,
    plot: Annotated[o.File, o.plot("throughput")] = None,
    output: Annotated[o.File, o.output("Write the data there too, as .json.")] = None,
    force: o.Force = False,
    wide: o.Wide = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure decoding throughput: policies, contexts and batches beside transformers, in one process.

    Caches are filled with random keys: no prompt has to be read. See docs/speed.md.

    For example:

      sfi bench --context 2K,4K --budget 256

      sfi bench --random-weights qwen3-0.6b --context 4K,32K --batch 1,4 --plot t.png

      sfi bench --context 8K --batch 8 --ragged --acceptance 0.95

      sfi bench --random-weights qwen3-4b --forecast --set forecast.bandwidth=4300
    """
    settings = given(
        "bench", preset=preset, file=config, sets=sets,
        options={"budget": budget, "engine.kv_device_budget": kv_device_budget},
    )  # fmt: skip
    asked = {
        "policies": _names(policy), "contexts": _counts("contexts", context), "batches": _counts("batches", batch),
        "baselines": () if baseline == ["none"] else _names(baseline), "steps": steps, "repeats": repeats,
        "time_limit": time_limit, "slow_rate": _rate(slow_rate) if slow_rate else None, "ragged": ragged,
        "acceptance": acceptance, "seed": seed,
    }  # fmt: skip
    run(
        Subject.of(settings, model, dtype, device, trust_remote_code, random_weights=random_weights, seed=seed),
        settings,
        asked,
        Output(output, suffix=".json", plot=plot, json=json, quiet=quiet, force=force, wide=wide),
        threads=threads,
        forecast=forecast,
    )


def _names(values: list[str] | None) -> tuple[str, ...] | None:
    return tuple(words(values)) if values else None


def _counts(name: str, values: list[str] | None) -> tuple[int, ...] | None:
    # whole numbers such as 8192 or 8K

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


def run(
    subject: Subject, settings: Given, asked: dict[str, Any], output: Output, *, threads: int | None, forecast: bool
) -> None:
    """Measure or forecast, write and show the result; `asked` has fields of `DecodeSettings`, None for a default."""
    import torch

    from sfi_core.measure.bench.bench import check_run
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
    fields = {name: value for name, value in asked.items() if value is not None} | settings.of("bench")
    checked = DecodeSettings(**fields, config=settings.config, engine=settings.table(EngineOptions))
    check_run(checked, device)
    with output:
        if forecast:
            document, interrupted = _forecast(subject, checked, device, settings.table(ForecastTable)), False
        else:
            document, interrupted = _measured(subject, checked, output)
        if forecast or document["rows"]:
            from sfi_cli.commands.bench.views import bench_text, forecast_text
            from sfi_traces.results.plots import plot_bench

            document["model"]["name"] = subject.name
            output.show(document, forecast_text if forecast else bench_text)
            output.file(document)
            output.figure(plot_bench, document)
        if interrupted:
            leave_interrupted()


def _measured(subject: Subject, settings: DecodeSettings, output: Output) -> tuple[dict[str, Any], bool]:
    # the document, and whether Ctrl-C ended the run
    from sfi_cli.terminal.progress import Progress
    from sfi_core.measure.bench.bench import run_bench

    output.say(f"loading {subject.name}")
    model, _ = subject.loaded()
    with Progress(quiet=output.quiet) as progress:
        result = run_bench(model, settings, progress.update, output.say)
    document = result.document()
    document["model"]["weights"] = subject.loading["weights"]
    return document, result.interrupted


def _forecast(subject: Subject, settings: DecodeSettings, device: Any, machine: ForecastTable) -> dict[str, Any]:
    from sfi_core.measure.bench.byte_roofline import forecast_document

    return forecast_document(
        subject.unloaded(), settings, device, bandwidth_gb_per_s=machine.bandwidth,
        memory_bytes=None if machine.memory is None else machine.memory * 1e9,
    )  # fmt: skip


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
