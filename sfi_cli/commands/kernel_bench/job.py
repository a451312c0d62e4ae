"""`sfi kernel-bench` after its options are read."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from sfi_cli.commands.kernel_bench.views import bench_text, compiled_text
from sfi_cli.terminal.output import Output, leave_interrupted, message
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import ConfigError

FORMATS, COMPILED_FORMATS = (".json", ".parquet"), (".json", ".md")


def check_combination(
    *, compile_only: bool, arch: list[str] | None, sweep: str | None, plot: Path | None
) -> None:
    """Refuse options that would have no effect.

    Raises:
        ConfigError: `--arch` without `--compile-only`, or a sweep or a plot with it.
    """
    if arch and not compile_only:
        raise ConfigError("arch must come with --compile-only, got --arch alone")
    if compile_only and (sweep or plot):
        raise ConfigError("compile-only times nothing and must come without --sweep and --plot")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBenchJob:
    """The options of a timed run; `settings` are those of `KernelSettings`, None for its default."""

    settings: dict[str, Any]
    sweep: str | None
    backend: str
    device: str
    output: Output

    def run(self) -> None:
        """Check and time the ops, write and show the result; then raise if an op failed its check."""
        from sfi_core.measure.kernel_bench import KernelSettings, resolve_backend
        from sfi_core.models.load import resolve_device

        given = {name: value for name, value in self.settings.items() if value is not None}
        if self.sweep is None:
            settings = KernelSettings(**given)
        elif "retentions" in given:
            raise ConfigError("retention must not be given with --sweep, which has its own")
        else:
            settings = KernelSettings.for_sweep(self.sweep, given.pop("ops", None), **given)
        if self.output.plot is not None and "fast" not in settings.ops:
            raise ConfigError(f"op must include fast for --plot, got {settings.ops}")
        device = resolve_device(self.device)
        backend = resolve_backend(self.backend, device)
        self.output.check_format(FORMATS)
        with self.output:
            result = self._run(settings, backend, device)
        if result.interrupted:
            leave_interrupted()
        result.check()

    def _run(self, settings: Any, backend: str, device: Any) -> Any:
        from sfi_core.measure.kernel_bench import run_bench
        from sfi_traces.results.kernel_bench import write_parquet, write_plot

        self.output.say(f"benchmarking the {backend} backend on {device.type}")
        with BenchProgress(quiet=self.output.quiet) as progress:
            result = run_bench(settings, backend, device, progress.update)
        document = result.document()
        if document["rows"]:
            self.output.show(document, partial(bench_text, sweep=settings.sweep))
            self.output.rows(document, write_parquet)
            if any(row["op"] == "fast" and row["median_us"] for row in document["rows"]):
                self.output.figure(write_plot, document)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """The options of an offline compilation; an output .md gets the Markdown table."""

    architectures: list[str]
    output: Output

    def run(self) -> None:
        """Compile every kernel for every architecture, and show registers, spills and shared memory.

        Raises:
            typer.Exit: With 1 if a kernel spills registers or does not fit.
        """
        from sfi_core.measure.kernel_bench.compile_check import ARCHS

        for name in self.architectures:
            if name not in ARCHS:
                raise ConfigError(f"unknown arch {name!r}; expected one of {ARCHS}")
        self.output.check_format(COMPILED_FORMATS)
        with self.output:
            bad = self._run()
        if bad:
            raise typer.Exit(1)

    def _run(self) -> int:
        from sfi_core.machine.describe import describe_measured
        from sfi_core.machine.versions import versions
        from sfi_core.measure.kernel_bench.compile_check import compile_kernels, is_clean, markdown

        targets = ", ".join(self.architectures)
        self.output.say(f"compiling every kernel for {targets}; no GPU is needed")
        with BenchProgress(quiet=self.output.quiet) as progress:
            compiled = compile_kernels(self.architectures, progress.compiled)
        about = {"machine": describe_measured(), "versions": versions()}
        document = {"rows": [], "compiled": compiled, **about}
        self.output.show(document, lambda _: compiled_text(compiled))
        if self.output.path is not None and self.output.path.suffix == ".md":
            self.output.text(markdown(compiled))
        elif self.output.path is not None:
            self.output.document(document)
        bad = [f"{row['kernel']} on {row['arch']}" for row in compiled if not is_clean(row)]
        if bad:
            message(f"error: kernels must neither spill nor exceed a limit, got {', '.join(bad)}")
        return len(bad)
