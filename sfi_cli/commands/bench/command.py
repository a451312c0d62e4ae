"""`sfi bench`: tokens per second of decoding, or what to expect of them."""

from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_core.settings.engine import EngineOptions

MEASURE, FORECAST = "Measurement", "Forecast"
# defaults live in DecodeSettings, which imports torch; the help repeats them and a test compares
SHOWN = {
    "policies": "sfi,full-kv",
    "contexts": "4096",
    "batches": "1",
    "baselines": "transformers-dynamic,transformers-static",
    "steps": "40",
    "warm_up": "4",
    "repeats": "3",
    "slow_rate": "1/20",
    "prefill_chunk": "4096",
}


def _measure(name: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        help=text, show_default=SHOWN.get(name, "none"), rich_help_panel=MEASURE
    )
    return option


def _flag(text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=text, rich_help_panel=MEASURE)
    return option


def bench(
    policy: Annotated[
        list[str] | None, _measure("policies", "Policies; comma list or repeated.")
    ] = None,
    context: Annotated[
        list[str] | None, _measure("contexts", "Cached tokens, 8192 or 8K; comma list or repeated.")
    ] = None,
    batch: Annotated[
        list[str] | None, _measure("batches", "Requests together; comma list or repeated.")
    ] = None,
    baseline: Annotated[
        list[str] | None, _measure("baselines", "What else takes turns; comma list, or none.")
    ] = None,
    steps: Annotated[int | None, _measure("steps", "Decoding steps measured in each run.")] = None,
    warm_up: Annotated[int | None, _measure("warm_up", "Decoding steps before them.")] = None,
    repeats: Annotated[
        int | None, _measure("repeats", "Runs of each; all take their turn in each repeat.")
    ] = None,
    time_limit: Annotated[
        float | None,
        _measure(
            "time_limit", "Seconds after which a run stops early; it measures at least 3 steps."
        ),
    ] = None,
    slow_rate: Annotated[
        str | None,
        _measure("slow_rate", "Share of steps at which a request is slow: 1/20 or 0.05."),
    ] = None,
    text: Annotated[
        str | None,
        _measure("text", "Let this text's tokens decide the slow steps: a file, or bundled."),
    ] = None,
    ragged: Annotated[
        bool, _flag("Let contexts of a batch fall evenly from the context to half of it.")
    ] = False,
    synchronized: Annotated[
        bool, _flag("Also measure sfi with batch-synchronized slow steps.")
    ] = False,
    prefill: Annotated[
        bool, _flag("Read prompts for real, instead of filling the cache with random keys.")
    ] = False,
    prefill_chunk: Annotated[
        int | None, _measure("prefill_chunk", "Prompt tokens of one forward pass; 0 for all.")
    ] = None,
    seed: Annotated[int, _flag("Seed of weights, keys, values and tokens.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads.", show_default="PyTorch's own", rich_help_panel=MEASURE),
    ] = None,
    forecast: Annotated[
        bool,
        typer.Option(
            "--forecast",
            help="Say what to expect, without weights and without running.",
            rich_help_panel=FORECAST,
        ),
    ] = False,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            help="GB/s of the memory.",
            show_default="this machine's, measured",
            rich_help_panel=FORECAST,
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="GB of memory.", show_default="this machine's", rich_help_panel=FORECAST),
    ] = None,
    model: o.Model = None,
    random_weights: Annotated[
        str | None,
        typer.Option(
            help="A config.json, or qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-30b-a3b: no checkpoint needed.",
            show_default="none",
            rich_help_panel=o.MODEL,
        ),
    ] = None,
    revision: o.Revision = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    backend: o.Backend = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    preset: o.Preset = None,
    config: o.Config = None,
    sink: o.Sink = None,
    recent: o.Recent = None,
    recent_mode: o.RecentMode = None,
    budget: o.Budget = None,
    t_max: o.TMax = None,
    min_gap: o.MinGap = None,
    trigger: o.Triggers = None,
    trigger_policy: o.TriggerPolicy = None,
    trigger_delay: o.TriggerDelay = None,
    stride: o.Stride = None,
    slow_start: o.SlowStart = None,
    span: o.Span = None,
    window: o.Window = None,
    dense_layer: o.DenseLayers = None,
    group_reduce: o.GroupReduce = None,
    pack_weights: o.PackWeights = False,
    overlap: o.Overlap = True,
    graphs: o.Graphs = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw throughput to a .png or .svg.", rich_help_panel=o.OUTPUT),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the data there too: .json or .parquet.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = None,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure decoding throughput: policies, contexts and batches beside transformers, in one process.

    Caches are filled with random keys, so that no prompt has to be read. Beside each row stands the ratio
    that its bytes allow. docs/bench.md says what is measured and how.

    For example:

      sfi bench --context 2K,4K --budget 256

      sfi bench --random-weights qwen3-0.6b --context 4K,8K,16K,32K --batch 1,4 --plot throughput.png

      sfi bench --random-weights qwen3-4b --context 32K --batch 8 --ragged --synchronized --baseline none

      sfi bench --forecast --random-weights qwen3-4b --context 8K,32K,128K --batch 1,16 --bandwidth 4300
    """
    from sfi_cli.commands.bench.job import DecodeBenchJob
    from sfi_cli.loading import Subject
    from sfi_cli.terminal.output import Output

    triggers = {
        "t_max": t_max, "min_gap": min_gap, "triggers": trigger, "trigger_policy": trigger_policy,
        "stride": stride, "slow_start": slow_start,
    }  # fmt: skip
    others = {
        "sink": sink, "recent": recent, "recent_mode": recent_mode, "budget": budget,
        "trigger_delay": trigger_delay, "span": span, "window_prefill": window,
        "dense_layers": dense_layer, "group_reduce": group_reduce,
    }  # fmt: skip
    DecodeBenchJob(
        subject=Subject(
            model=model,
            random_weights=random_weights,
            loading={
                "revision": revision, "dtype": dtype, "device": device,
                "trust_remote_code": trust_remote_code,
            },
            pack_weights=pack_weights,
            seed=seed,
        ),
        lists={"policies": policy, "contexts": context, "batches": batch, "baselines": baseline},
        settings={
            "steps": steps, "warm_up": warm_up, "repeats": repeats, "time_limit": time_limit,
            "prefill_chunk": prefill_chunk, "ragged": ragged, "synchronized": synchronized,
            "prefill": prefill, "seed": seed, "backend": backend,
            "config": o.build_config(o.DEFAULTS, preset, config, {**triggers, **others}),
            "engine": EngineOptions(overlap=overlap, graphs=graphs),
        },
        trigger_options=[name for name, value in triggers.items() if value is not None],
        slow_rate=slow_rate,
        text=text,
        threads=threads,
        forecast=forecast,
        bandwidth=bandwidth,
        memory=memory,
        output=Output(output, plot=plot, json=json, quiet=quiet, force=force),
    ).run()  # fmt: skip
