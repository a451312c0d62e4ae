"""`sfi kernel-bench`: check every kernel, then time it."""

from functools import partial
from typing import Annotated, Any

from sfi_cli import options as o
from sfi_core.errors import ConfigError

SHAPE, MEASURE, COMPILE = "Shape", "Measurement", "Offline compilation"
ARCHITECTURES = "sm_80,sm_90,sm_100"
# copies of the defaults of KernelSettings, which imports torch; a test compares the two
SHOWN = {
    "context": "16384",
    "batch": "16",
    "heads": "32",
    "kv_heads": "8",
    "head_dim": "128",
    "retentions": "0.125",
    "ops": "fast,dense,verify,mixed_heads,selector,top_k,pack,recall,append,codescan,prompt,rms_norm,rotary,silu_mul",
}
_measure = partial(o.option, MEASURE)
_compile = partial(o.option, COMPILE)
_out = partial(o.option, o.OUTPUT)


def _shape(name: str, text: str) -> Any:
    on_cpu = {"context": "; on a CPU 4096", "batch": "; on a CPU 1"}
    return o.option(SHAPE, text, shown=SHOWN[name] + on_cpu.get(name, ""))


def kernel_bench(
    context: Annotated[o.Number, _shape("context", "Cached tokens of a request.")] = None,
    batch: Annotated[o.Number, _shape("batch", "Requests.")] = None,
    heads: Annotated[o.Number, _shape("heads", "Query heads.")] = None,
    kv_heads: Annotated[o.Number, _shape("kv_heads", "KV heads.")] = None,
    head_dim: Annotated[o.Number, _shape("head_dim", "Numbers of a head.")] = None,
    dtype: Annotated[str, o.option(SHAPE, "auto (bfloat16), bfloat16, float16, float32.")] = "auto",
    retention: Annotated[
        o.Words, _shape("retentions", "Share of the context that a fast step reads; comma list or repeated.")
    ] = None,
    op: Annotated[o.Words, _measure("What to time; comma list or repeated.", shown=SHOWN["ops"])] = None,
    sweep: Annotated[
        str | None, _measure("retention: the paper's Table 1, of fast and dense unless --op says otherwise.")
    ] = None,
    repeats: Annotated[o.Number, _measure("Timed calls of each op.", shown="5, on CUDA 100")] = None,
    seed: Annotated[int, _measure("Seed of the random inputs.")] = 0,
    backend: Annotated[str, _measure("auto, torch or triton.")] = "auto",
    device: Annotated[str, _measure("auto, cpu, cuda, cuda:1, ...")] = "auto",
    compile_only: Annotated[
        bool, _compile("Compile every kernel without a GPU; show registers, spills, shared memory.", "--compile-only")
    ] = False,
    arch: Annotated[o.Words, _compile("Targets; comma list or repeated.", shown=ARCHITECTURES)] = None,
    plot: Annotated[o.File, _out("Draw speed-up and GB/s to a .png or .svg.")] = None,
    output: Annotated[
        o.File, _out("Write the data there too: .parquet, .json; with --compile-only .md.", "--output", "-o")
    ] = None,
    force: o.Force = False,
    wide: o.Wide = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Check each kernel against its formula, then time it beside PyTorch's SDPA and other rivals.

    Without a GPU the PyTorch backend is timed. An op that fails its check is named and not timed.

    For example:

      sfi kernel-bench --sweep retention --plot sweep.png

      sfi kernel-bench --context 32768 --batch 4 --op fast,dense --json

      sfi kernel-bench --compile-only --arch sm_80,sm_90
    """
    from sfi_cli.commands.kernel_bench.job import compile_all, run
    from sfi_cli.parsing import numbers, words
    from sfi_cli.terminal.output import Output

    if arch and not compile_only:
        raise ConfigError("arch must come with --compile-only, got --arch alone")
    if compile_only and (sweep or plot):
        raise ConfigError("compile-only times nothing and must come without --sweep and --plot")
    written = Output(output, plot=plot, json=json, quiet=quiet, force=force, wide=wide)
    if compile_only:
        compile_all(words(arch or [ARCHITECTURES]), written)
        return
    shares = numbers(retention or [], float, "retention must be a number")
    settings = {
        "context": context, "batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "dtype": dtype, "retentions": tuple(dict.fromkeys(shares)) if retention else None,
        "ops": tuple(words(op)) if op else None, "repeats": repeats, "seed": seed,
    }  # fmt: skip
    run(settings, sweep, backend, device, written)
