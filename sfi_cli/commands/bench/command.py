"""`sfi bench`: tokens per second of decoding, or what to expect of them."""

from functools import partial
from typing import Annotated, Any

from sfi_cli import options as o

MEASURE, FORECAST = "Measurement", "Forecast"
# copies of the defaults of DecodeSettings, which imports torch; a test compares the two
SHOWN = {
    "policies": "sfi,codescan,full-kv",
    "contexts": "4096,16384,32768",
    "batches": "1",
    "baselines": "transformers-dynamic,transformers-static",
    "steps": "40",
    "repeats": "3",
    "slow_rate": "1/20",
}
_more = partial(o.option, MEASURE)
_forecast = partial(o.option, FORECAST)
_out = partial(o.option, o.OUTPUT)
_model = partial(o.option, o.MODEL)


def _measure(name: str, text: str) -> Any:
    return _more(text, shown=SHOWN.get(name, "none"))


def bench(
    policy: Annotated[o.Words, _measure("policies", "Policies; comma list or repeated.")] = None,
    context: Annotated[o.Words, _measure("contexts", "Cached tokens, 8192 or 8K; comma list or repeated.")] = None,
    batch: Annotated[o.Words, _measure("batches", "Requests together; comma list or repeated.")] = None,
    baseline: Annotated[o.Words, _measure("baselines", "What else takes turns; comma list, or none.")] = None,
    steps: Annotated[o.Number, _measure("steps", "Decoding steps measured in each run.")] = None,
    repeats: Annotated[o.Number, _measure("repeats", "Runs of each; all take turns.")] = None,
    time_limit: Annotated[
        float | None,
        _more("Seconds after which a run stops early; it measures at least 3 steps.", shown="none; on a CPU 2"),
    ] = None,
    slow_rate: Annotated[
        str | None, _measure("slow_rate", "Share of steps at which a request is slow: 1/20 or 0.05.")
    ] = None,
    ragged: Annotated[
        bool, _more("Let contexts of a batch fall evenly from the context to half of it.", "--ragged")
    ] = False,
    acceptance: Annotated[
        float | None, _measure("acceptance", "Measure lossless runs too, which keep this share of their drafts.")
    ] = None,
    seed: Annotated[int, _more("Seed of weights, keys, values and tokens.")] = 0,
    threads: Annotated[o.Number, _more("CPU threads.", shown="PyTorch's own")] = None,
    forecast: Annotated[
        bool, _forecast("Say what to expect, without weights and without running.", "--forecast")
    ] = False,
    model: o.Model = None,
    random_weights: Annotated[
        str | None,
        _model("A config.json, or a name such as qwen3-4b or llama-3.1-8b: no checkpoint needed.", shown="none"),
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_device_budget: o.KvDeviceBudget = None,
    trust_remote_code: o.TrustRemoteCode = False,
    preset: o.Preset = None,
    config: o.Config = None,
    sets: Annotated[o.Words, o.sets()] = None,
    budget: o.Budget = None,
    plot: Annotated[o.File, _out("Draw throughput to a .png or .svg.")] = None,
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
    from sfi_cli.commands.bench.job import counts, names, run
    from sfi_cli.settings import given
    from sfi_cli.terminal.output import Output

    settings = given(
        "bench", preset=preset, file=config, sets=sets,
        options={"budget": budget, "engine.kv_device_budget": kv_device_budget},
    )  # fmt: skip
    run(
        o.Subject.of(
            settings, model, dtype, device, trust_remote_code, random_weights=random_weights, seed=seed
        ),
        settings,
        {
            "policies": names(policy), "contexts": counts("contexts", context),
            "batches": counts("batches", batch), "baselines": names(baseline, nothing="none"), "steps": steps,
            "repeats": repeats, "time_limit": time_limit, "ragged": ragged, "acceptance": acceptance,
            "seed": seed,
        },
        Output(output, plot=plot, json=json, quiet=quiet, force=force, wide=wide),
        slow_rate=slow_rate, threads=threads, forecast=forecast,
    )  # fmt: skip
