"""`sfi kernel-bench`: check every kernel, then time it."""

from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o

SHAPE, MEASURE, COMPILE = "Shape", "Measurement", "Offline compilation"
ARCHITECTURES = "sm_80,sm_90,sm_100"
# defaults live in KernelSettings, which imports torch; the help repeats them and a test compares
SHOWN = {
    "context": "16384",
    "batch": "16",
    "heads": "32",
    "kv_heads": "8",
    "head_dim": "128",
    "retentions": "0.125",
    "ops": "fast,dense,verify,mixed_heads,selector,top_k,pack,recall,append,encode_keys,scan_codes,"
    "prompt,rms_norm,rotary,silu_mul",
}


def _shape(name: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        help=text, show_default=SHOWN[name], rich_help_panel=SHAPE
    )
    return option


def kernel_bench(
    context: Annotated[int | None, _shape("context", "Cached tokens of a request.")] = None,
    batch: Annotated[int | None, _shape("batch", "Requests.")] = None,
    heads: Annotated[int | None, _shape("heads", "Query heads.")] = None,
    kv_heads: Annotated[int | None, _shape("kv_heads", "KV heads.")] = None,
    head_dim: Annotated[int | None, _shape("head_dim", "Numbers of a head.")] = None,
    dtype: Annotated[
        str,
        typer.Option(help="auto (bfloat16), bfloat16, float16, float32.", rich_help_panel=SHAPE),
    ] = "auto",
    retention: Annotated[
        list[str] | None,
        _shape(
            "retentions", "Share of the context that a fast step reads; comma list or repeated."
        ),
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="What to time; comma list or repeated.",
            show_default=SHOWN["ops"],
            rich_help_panel=MEASURE,
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="retention: the paper's Table 1, of fast and dense unless --op says otherwise.",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Timed calls of each op.", show_default="9, on CUDA 100", rich_help_panel=MEASURE
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the random inputs.", rich_help_panel=MEASURE)
    ] = 0,
    backend: Annotated[
        str, typer.Option(help="auto, torch or triton.", rich_help_panel=MEASURE)
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=MEASURE)
    ] = "auto",
    compile_only: Annotated[
        bool,
        typer.Option(
            "--compile-only",
            help="Compile every kernel without a GPU; show registers, spills, shared memory.",
            rich_help_panel=COMPILE,
        ),
    ] = False,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Targets; comma list or repeated.",
            show_default=ARCHITECTURES,
            rich_help_panel=COMPILE,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw speed-up and GB/s to a .png or .svg.", rich_help_panel=o.OUTPUT),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the data there too: .parquet, .json; with --compile-only .md.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = None,
    force: o.Force = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Check each kernel against its formula, then time it beside PyTorch's SDPA and other rivals.

    Without a GPU the PyTorch backend is timed. An op that fails its check is named and has no time.

    For example:

      sfi kernel-bench --sweep retention --plot sweep.png

      sfi kernel-bench --context 32768 --batch 4 --op fast,dense --json

      sfi kernel-bench --compile-only --arch sm_80,sm_90
    """
    from sfi_cli.commands.kernel_bench.job import (
        CompileJob,
        KernelBenchJob,
        check_combination,
    )
    from sfi_cli.parsing import numbers, words
    from sfi_cli.terminal.output import Output

    check_combination(compile_only=compile_only, arch=arch, sweep=sweep, plot=plot)
    written = Output(output, plot=plot, json=json, quiet=quiet, force=force)
    if compile_only:
        CompileJob(architectures=words(arch or [ARCHITECTURES]), output=written).run()
        return
    shares = numbers(retention or [], float, "retention must be a number")
    settings = {
        "context": context, "batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "dtype": dtype, "retentions": tuple(dict.fromkeys(shares)) if retention else None,
        "ops": tuple(words(op)) if op else None, "repeats": repeats, "seed": seed,
    }  # fmt: skip
    KernelBenchJob(
        settings=settings, sweep=sweep, backend=backend, device=device, output=written
    ).run()
