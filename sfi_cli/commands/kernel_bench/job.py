"""What `sfi kernel-bench` does between its options and its output."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import typer

from sfi_cli.commands.kernel_bench.views import bench_text, compiled_text
from sfi_cli.terminal.file_output import FileOutput
from sfi_cli.terminal.output import Output, message
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import ConfigError

INTERRUPTED = 130
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


def words(values: list[str]) -> list[str]:
    """Split comma lists, and join what was repeated."""
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def numbers(name: str, values: list[str] | None) -> tuple[float, ...] | None:
    """Read comma lists of numbers.

    Raises:
        ConfigError: One is no number.
    """
    if not values:
        return None
    found = []
    for word in words(values):
        try:
            found.append(float(word))
        except ValueError as error:
            raise ConfigError(f"{name} must be a number, got {word!r}") from error
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the output options said.

    Attributes:
        output: File of the data, or None.
        plot: File of the figure, or None.
        json: Whether stdout gets the document.
        quiet: Whether stderr stays empty.
        force: Whether files may be overwritten.
    """

    output: Path | None = None
    plot: Path | None = None
    json: bool = False
    quiet: bool = False
    force: bool = False

    def show(self, document: dict[str, Any], text: str) -> None:
        """Print the document or what a person reads."""
        shown = Output(None, force=False)
        if self.json:
            shown.document(document)
        else:
            shown.text(text)

    def say(self, text: str) -> None:
        """Tell a person what is happening."""
        if not self.quiet:
            message(text)


@dataclass(slots=True, kw_only=True)
class BenchFiles:
    """Where the data goes besides stdout.

    Attributes:
        output: The document, the rows or the table of compiled kernels, by the suffix; None for none.
        plot: The figure; None for none.
    """

    output: FileOutput | None = None
    plot: FileOutput | None = None

    @classmethod
    def opened(cls, written: Written, formats: tuple[str, ...]) -> Self:
        """Check the paths before the work starts.

        Raises:
            ConfigError: A file exists, or its suffix is none of `formats`.
            BackendError: A plot without matplotlib.
        """
        output, plot = written.output, written.plot
        if output is not None and output.suffix not in formats:
            raise ConfigError(f"output must end in one of {formats}, got {output.name}")
        if plot is not None:
            from sfi_traces.results.kernel_bench import check_plot

            check_plot(plot)
        files = cls()
        try:
            if output is not None:
                files.output = FileOutput(output, force=written.force, quiet=written.quiet)
            if plot is not None:
                files.plot = FileOutput(plot, force=written.force, quiet=written.quiet)
        except BaseException:
            files.discard()
            raise
        return files

    def discard(self) -> None:
        """Remove the temporary files of a command that failed."""
        for file in (self.output, self.plot):
            if file is not None:
                file.discard()

    def save(self, document: dict[str, Any]) -> None:
        """Write the document, or its rows, and the figure."""
        from sfi_traces.results.kernel_bench import write_parquet, write_plot

        output, plot = self.output, self.plot
        if output is not None and output.path.suffix == ".parquet":
            output.save(lambda path: write_parquet(document, path))
        elif output is not None:
            output.document(document)
        if plot is not None and any(row["op"] == "fast" for row in document["rows"]):
            kind = plot.path.suffix.removeprefix(".")
            plot.save(lambda path: write_plot(document, path, kind=kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """Everything the options of a timed run said.

    Attributes:
        settings: Keyword arguments of `KernelSettings`; those that are None stay at its defaults.
        sweep: A sweep's name, or None.
        backend: auto, torch or triton.
        device: auto, cpu, cuda, ...
        written: The output options.
    """

    settings: dict[str, Any]
    sweep: str | None
    backend: str
    device: str
    written: Written

    def run(self) -> None:
        """Check, time, write and show.

        Raises:
            SfiError: What the user can mend, or an op that is wrong.
            typer.Exit: With 130 after Ctrl-C.
        """
        from sfi_core.measure.kernel_bench import KernelSettings, resolve_backend
        from sfi_core.models.load import resolve_device

        given = {name: value for name, value in self.settings.items() if value is not None}
        if self.sweep is None:
            settings = KernelSettings(**given)
        elif "retentions" in given:
            raise ConfigError("retention must not be given with --sweep, which has its own")
        else:
            settings = KernelSettings.for_sweep(self.sweep, given.pop("ops", None), **given)
        if self.written.plot is not None and "fast" not in settings.ops:
            raise ConfigError(f"op must include fast for --plot, got {settings.ops}")
        device = resolve_device(self.device)
        backend = resolve_backend(self.backend, device)
        files = BenchFiles.opened(self.written, FORMATS)
        try:
            self._run(settings, backend, device, files)
        finally:
            files.discard()

    def _run(self, settings: Any, backend: str, device: Any, files: BenchFiles) -> None:
        from sfi_core.measure.kernel_bench import run_bench

        self.written.say(f"benchmarking the {backend} backend on {device.type}")
        with BenchProgress(quiet=self.written.quiet) as progress:
            result = run_bench(settings, backend, device, progress.update)
        document = result.document()
        if document["rows"]:
            self.written.show(document, bench_text(document, sweep=settings.sweep))
            files.save(document)
        if result.interrupted:
            message("interrupted")
            raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """Everything the options of an offline compilation said.

    Attributes:
        architectures: Names such as sm_90.
        written: The output options; a .md gets the Markdown table.
    """

    architectures: list[str]
    written: Written

    def run(self) -> None:
        """Compile every kernel for every architecture, and show what came of it.

        Raises:
            typer.Exit: With 1 if a kernel spills registers or does not fit.
        """
        from sfi_core.measure.kernel_bench.compile_check import ARCHS

        for name in self.architectures:  # before the first word on stderr
            if name not in ARCHS:
                raise ConfigError(f"unknown arch {name!r}; expected one of {ARCHS}")
        files = BenchFiles.opened(self.written, COMPILED_FORMATS)
        try:
            bad = self._run(files)
        finally:
            files.discard()
        if bad:
            raise typer.Exit(1)

    def _run(self, files: BenchFiles) -> int:
        from sfi_core.machine.describe import describe_measured
        from sfi_core.machine.versions import versions
        from sfi_core.measure.kernel_bench.compile_check import compile_kernels, is_clean, markdown

        targets = ", ".join(self.architectures)
        self.written.say(f"compiling every kernel for {targets}; no GPU is needed")
        with BenchProgress(quiet=self.written.quiet) as progress:
            compiled = compile_kernels(self.architectures, progress.compiled)
        document = {
            "rows": [],
            "compiled": compiled,
            "machine": describe_measured(),
            "versions": versions(),
        }
        self.written.show(document, compiled_text(compiled))
        if files.output is not None and files.output.path.suffix == ".md":
            files.output.text(markdown(compiled))
        elif files.output is not None:
            files.output.document(document)
        bad = [f"{row['kernel']} on {row['arch']}" for row in compiled if not is_clean(row)]
        if bad:
            message(f"error: kernels must neither spill nor exceed a limit, got {', '.join(bad)}")
        return len(bad)
