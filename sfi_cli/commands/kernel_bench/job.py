"""`sfi kernel-bench` after its options are read."""

from functools import partial
from typing import Any

import typer

from sfi_cli.commands.kernel_bench.views import bench_text, compiled_text
from sfi_cli.terminal.output import Output, leave_interrupted, message
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import ConfigError, unknown

FORMATS, COMPILED_FORMATS = (".json", ".parquet"), (".json", ".md")


def run(asked: dict[str, Any], sweep: str | None, backend: str, device: str, output: Output) -> None:
    """Check and time the ops, write and show the result; then raise if an op failed its check.

    `asked` are the fields of `KernelSettings`, None for a field's default.
    """
    from sfi_core.measure.kernel_bench.bench import run_bench
    from sfi_core.measure.kernel_bench.settings import CPU_SHAPE, KernelSettings, resolve_backend
    from sfi_core.models.load import resolve_device
    from sfi_traces.results.kernel_bench import write_parquet, write_plot

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
    if output.plot is not None and "fast" not in settings.ops:
        raise ConfigError(f"op must include fast for --plot, got {settings.ops}")
    backend = resolve_backend(backend, where)
    output.check_format(FORMATS)
    with output:
        output.say(f"benchmarking the {backend} backend on {where.type}")
        with BenchProgress(quiet=output.quiet) as progress:
            result = run_bench(settings, backend, where, progress.update)
        document = result.document()
        if document["rows"]:
            output.show(document, partial(bench_text, sweep=settings.sweep))
            output.rows(document, write_parquet)
            if any(row["op"] == "fast" and row["median_us"] for row in document["rows"]):
                output.figure(write_plot, document)
    if result.interrupted:
        leave_interrupted()
    result.check()


def compile_all(architectures: list[str], output: Output) -> None:
    """Compile every kernel, and show registers, spills and shared memory; an output .md is a page.

    Raises:
        typer.Exit: With 1 if a kernel spills registers or does not fit.
    """
    from sfi_core.machine.describe import describe_measured
    from sfi_core.machine.versions import versions
    from sfi_core.measure.kernel_bench.compile_check import ARCHS, compile_kernels, is_clean, markdown

    for name in architectures:
        if name not in ARCHS:
            raise unknown("arch", name, ARCHS)
    output.check_format(COMPILED_FORMATS)
    with output:
        output.say(f"compiling every kernel for {', '.join(architectures)}; no GPU is needed")
        with BenchProgress(quiet=output.quiet) as progress:
            compiled = compile_kernels(architectures, progress.compiled)
        about = {"machine": describe_measured(), "versions": versions()}
        document = {"rows": [], "compiled": compiled, **about}
        output.show(document, lambda _: compiled_text(compiled))
        if output.path is not None and output.path.suffix == ".md":
            output.text(markdown(compiled))
        elif output.path is not None:
            output.document(document)
        bad = [f"{row['kernel']} on {row['arch']}" for row in compiled if not is_clean(row)]
        if bad:
            message(f"error: kernels must neither spill nor exceed a limit, got {', '.join(bad)}")
    if bad:
        raise typer.Exit(1)
