"""`sfi kernel-bench`: check every kernel, then time it; the tables of its document."""

from functools import partial
from itertools import count
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.terminal.output import Output, leave_interrupted, message
from sfi_cli.terminal.tables import Part, noted
from sfi_core.errors import ConfigError, unknown
from sfi_core.measure.kernel_bench.settings import CPU_SHAPE, OPS, TABLE_1, KernelSettings
from sfi_traces.views.table import Columns, Table, duration, number, percent, ratio, written

SHAPE = "Shape"
THIS = "this GPU's; sm_90 without one"
DEFAULTS = KernelSettings()
RETENTION = ",".join(map(str, DEFAULTS.retentions))
READ = "Share of the context that a fast step reads; comma list or repeated."
_measure, _compile = partial(o.option, "Measurement"), partial(o.option, "Offline compilation")


def _shape(name: str, text: str) -> Any:
    on_cpu = f"; on a CPU {CPU_SHAPE[name]}" if name in CPU_SHAPE else ""
    return o.option(SHAPE, text, shown=f"{getattr(DEFAULTS, name)}{on_cpu}")


def kernel_bench(
    context: Annotated[o.Number, _shape("context", "Cached tokens of a request.")] = None,
    batch: Annotated[o.Number, _shape("batch", "Requests.")] = None,
    heads: Annotated[o.Number, _shape("heads", "Query heads.")] = None,
    kv_heads: Annotated[o.Number, _shape("kv_heads", "KV heads.")] = None,
    head_dim: Annotated[o.Number, _shape("head_dim", "Numbers of a head.")] = None,
    dtype: Annotated[str, o.option(SHAPE, "auto (bfloat16), bfloat16, float16, float32.")] = "auto",
    retention: Annotated[o.Words, o.option(SHAPE, READ, shown=RETENTION)] = None,
    op: Annotated[o.Words, _measure("What to time; comma list or repeated.", shown=",".join(OPS))] = None,
    sweep: Annotated[
        o.Text, _measure("retention: the paper's Table 1, of fast and dense unless --op is given.")
    ] = None,
    repeats: Annotated[o.Number, _measure("Timed calls of each op.", shown="5, on CUDA 100")] = None,
    seed: Annotated[int, _measure("Seed of the random inputs.")] = 0,
    backend: Annotated[str, _measure("auto, torch or triton.")] = "auto",
    device: Annotated[str, _measure("auto, cpu, cuda, cuda:1, ...")] = "auto",
    compile_only: Annotated[bool, _compile("Without a GPU: registers and spills.", "--compile-only")] = False,
    arch: Annotated[o.Words, _compile("Targets; comma list or repeated.", shown=THIS)] = None,
    output: Annotated[o.File, o.output("Write the data there too, as .json.")] = None,
    force: o.Force = False,
    wide: o.Wide = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Check each kernel against its formula, then time it beside PyTorch's SDPA.

    Without a GPU the PyTorch backend is timed. An op that fails its check is named and not timed.

    For example:

      sfi kernel-bench --sweep retention

      sfi kernel-bench --context 32768 --batch 4 --op fast,dense --json

      sfi kernel-bench --compile-only --arch sm_80,sm_90
    """
    from sfi_cli.parsing import numbers, words

    if arch and not compile_only:
        raise ConfigError("arch must come with --compile-only, got --arch alone")
    if compile_only and sweep:
        raise ConfigError("compile-only times nothing and must come without --sweep")
    written = Output(output, suffix=".json", json=json, quiet=quiet, force=force, wide=wide)
    if compile_only:
        compile_all(words(arch or []), written)
        return
    shares = numbers(retention, float, "retention must be a number") if retention else []
    settings = {
        "context": context, "batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "dtype": dtype, "retentions": tuple(dict.fromkeys(shares)) or None,
        "ops": tuple(words(op)) if op else None, "repeats": repeats, "seed": seed,
    }  # fmt: skip
    run(settings, sweep, backend, device, written)


def run(asked: dict[str, Any], sweep: str | None, backend: str, device: str, output: Output) -> None:
    """Check and time ops by `asked`, fields of `KernelSettings`, and show them; then raise if one failed its check."""
    from sfi_cli.terminal.progress import Progress
    from sfi_core.measure.kernel_bench.bench import resolve_backend, run_bench
    from sfi_core.models.load import resolve_device

    where = resolve_device(device)
    given = {name: value for name, value in asked.items() if value is not None}
    if where.type == "cpu":  # the retentions of a sweep need the paper's context
        given = {name: value for name, value in CPU_SHAPE.items() if not sweep or name == "batch"} | given
    if sweep is None:
        settings = KernelSettings(**given)
    elif "retentions" in given:
        raise ConfigError("retention must not be given with --sweep, which has its own")
    else:
        settings = KernelSettings.for_sweep(sweep, given.pop("ops", None), **given)
    backend = resolve_backend(backend, where)
    with output:
        output.say(f"benchmarking the {backend} backend on {where.type}")
        with Progress(quiet=output.quiet) as progress:

            def show_group(title: str, rows: list[dict[str, Any]]) -> None:
                progress.clear()  # the bar would be drawn over what is written
                if not output.json:
                    output.show({"rows": rows}, partial(group_text, title=title))
                    output.stream("\n")

            result = run_bench(settings, backend, where, progress.update, show_group)
        document = result.document()
        if document["rows"]:
            output.show(document, partial(closing_text, sweep=settings.sweep))
            output.file(document)
    if result.interrupted:
        leave_interrupted()
    result.check()


def compile_all(architectures: list[str], output: Output) -> None:
    """Compile every kernel, by default for this machine; exit with 1 if one spills registers or does not fit."""
    from sfi_cli.terminal.progress import Progress
    from sfi_core.machine.memory import describe_measured
    from sfi_core.machine.versions import versions
    from sfi_core.measure.kernel_bench.compile_check import ARCHS, compile_kernels, default_arch, is_clean

    architectures = architectures or [default_arch()]
    for name in architectures:
        if name not in ARCHS:
            raise unknown("arch", name, ARCHS)
    with output:
        output.say(f"compiling every kernel for {', '.join(architectures)}; no GPU is needed")
        with Progress(quiet=output.quiet) as progress:
            numbers = count(1)

            def show(row: dict[str, Any], total: int) -> None:
                progress.update(f"compiling, {row['kernel']} on {row['arch']}", next(numbers), total)

            compiled = compile_kernels(architectures, show)
        document = {"rows": [], "compiled": compiled, "machine": describe_measured(), "versions": versions()}
        table = Table.of("Compiled kernels", COMPILED, compiled, left=2, spare=("async buffers",))
        output.show(document, lambda _: [table])
        output.file(document)
        bad = [f"{row['kernel']} on {row['arch']}" for row in compiled if not is_clean(row)]
        if bad:
            message(f"error: kernels must neither spill nor exceed a limit, got {', '.join(bad)}")
    if bad:
        raise typer.Exit(1)


def group_text(document: dict[str, Any], *, title: str) -> list[Part]:
    """Return the rows of a group, in the columns that say something of them."""
    rows = document["rows"]
    columns = {
        name: cell for name, cell in MEASURED.items() if any(written(cell, row) not in ("", "-") for row in rows)
    }
    spare = [name for name in ("x paper-like", "p90", "p10", "TFLOP/s", "of copy") if name in columns]
    return [Table.of(title, columns, rows, spare=spare)]


def closing_text(document: dict[str, Any], *, sweep: bool) -> list[Part]:
    """Return the machine, for a sweep the paper's Table 1 beside ours, and the notes."""
    machine = document["machine"]
    where, copy = machine.get("gpu") or machine["processor"], machine["copy_gb_per_s"]
    tables: list[Part] = [f"{document['backend']} backend on {where}, copy {copy:,.1f} GB/s"]
    if sweep:
        fast = [row for row in document["rows"] if row["op"] == "fast" and row["failure"] is None]
        title = "Speed-up of the fast step, beside the paper's Table 1"
        tables.append(Table.of(title, SWEPT, fast, left=0, spare=("bytes", "ours, x paper-like")))
    return noted(tables, [*document["notes"], *(f"failed: {failure}" for failure in document["failures"])])


def _read(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3g}"


def _over(name: str) -> Any:
    beside = ("fast", "dense", "verify", "prompt")  # ops that have such a rival
    return lambda row: ratio(row[f"speedup_over_{name}"] if row["op"].startswith(beside) else None)


MEASURED: Columns = {
    "op": lambda row: f"{row['op']} ({row['form']})" if row["form"] else str(row["op"]),
    "read %": (_read, "retention"),
    "launches": lambda row: str(row.get("launches") or ""),
    "median": lambda row: "FAILED" if row["median_us"] is None else duration(row["median_us"]),
    "p10": (duration, "p10_us"),
    "p90": (duration, "p90_us"),
    "GB/s": lambda row: "" if row["median_us"] is None else number(row["gb_per_s"], 1),
    "of copy": lambda row: "" if row["median_us"] is None else percent(row["bandwidth_share"], 0),
    "TFLOP/s": lambda row: "" if row["tflop_per_s"] is None else f"{row['tflop_per_s']:,.3g}",
    "x dense": _over("dense"),
    "x SDPA": _over("sdpa"),
    "x paper-like": _over("paper_like"),
}
SWEPT: Columns = {
    "read %": (_read, "retention"),
    "paper": lambda row: ratio(TABLE_1.get(row["retention"])),
    "bytes": (ratio, "ideal_speedup"),
    "ours, x dense": (ratio, "speedup_over_dense"),
    "ours, x SDPA": (ratio, "speedup_over_sdpa"),
    "ours, x paper-like": (ratio, "speedup_over_paper_like"),
}
COMPILED: Columns = {
    "kernel": (str, "kernel"),
    "arch": (str, "arch"),
    "registers": (str, "registers"),
    "spills B": (str, "spill_bytes"),
    "shared B": ("{:,}".format, "shared_bytes"),
    "async buffers": (str, "async_buffers"),
    "": lambda row: "OVER THE LIMIT" if row["over_limit"] else "SPILLS" if row["spill_bytes"] else "ok",
}
