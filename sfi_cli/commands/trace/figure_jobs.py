"""`sfi trace plot` and `sfi trace report` after their options are read."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfi_cli.terminal.output import Output, message
from sfi_core.errors import ConfigError, SfiError, TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotJob:
    """The options of `sfi trace plot`.

    Attributes:
        kinds: Figures to draw; empty for all that the trace has data for.
        request: The request, or None for the first.
        layer: The layer, or None for the mean over all.
        head: The KV head, or None for the mean over all.
        top: Positions of a support, or None for all that the audit recorded.
        form: "png", "svg" or None for the output's ending, else png.
        output: A folder, a file, or None for files beside the trace.
    """

    trace: Path
    kinds: tuple[str, ...]
    request: int | None
    layer: int | None
    head: int | None
    top: int | None
    form: str | None
    output: Path | None
    force: bool

    def run(self) -> None:
        """Draw each figure into its file.

        Raises:
            ConfigError: A kind, format, request, layer, head or file is invalid.
            TraceError: The trace lacks the data of a figure in `kinds`, or of all figures.
            BackendError: No matplotlib.
        """
        from sfi_traces.figures.style import check_matplotlib

        check_matplotlib("figures")
        paths = self._paths()
        view = open_view(self.trace, self.request, self.layer, self.head, self.top)
        with ExitStack() as stack:
            files = {
                kind: stack.enter_context(Output(plot=path, force=self.force))
                for kind, path in paths.items()
            }
            self._draw(view, files)

    def _draw(self, view: Any, files: dict[str, Output]) -> None:
        from sfi_traces.figures import draw
        from sfi_traces.figures.style import save

        lacking = []
        for kind, file in files.items():
            try:
                figure = draw(kind, view)
            except TraceError as error:
                if self.kinds:
                    raise
                message(f"left out {kind}: {error}")
                lacking.append(error)
                continue
            file.figure(save, figure)
        if len(lacking) == len(files):
            raise lacking[0]

    def _paths(self) -> dict[str, Path]:
        from sfi_traces.figures import KINDS
        from sfi_traces.figures.style import FORMATS

        kinds = tuple(dict.fromkeys(self.kinds)) or tuple(KINDS)
        for kind in kinds:
            if kind not in KINDS:
                raise ConfigError(f"unknown kind {kind!r}; expected one of {tuple(KINDS)}")
        if self.form not in (None, *FORMATS):
            raise ConfigError(f"format must be one of {FORMATS}, got {self.form}")
        output = self.output
        if output is None:
            return {kind: beside(self.trace, f"{kind}.{self.form or 'png'}") for kind in kinds}
        if not output.suffix or output.is_dir():
            _make(output)
            name = self.trace.resolve().name
            return {kind: output / f"{name}-{kind}.{self.form or 'png'}" for kind in kinds}
        if len(kinds) > 1:
            raise ConfigError(f"output must be a folder for {len(kinds)} figures, got {output}")
        wanted = FORMATS if self.form is None else (self.form,)
        if output.suffix.removeprefix(".") not in wanted:
            raise ConfigError(f"output must end in one of {wanted}, got {output.name}")
        return {kinds[0]: output}


def write_report(
    trace: Path, *, request: int | None, top: int | None, output: Path | None, force: bool
) -> None:
    """Write the report of a request.

    Raises:
        ConfigError: The request, top or file is invalid.
        TraceError: No trace, or one without a step.
        BackendError: No Plotly.
    """
    from sfi_traces.report import check_report, render

    check_report()
    view = open_view(trace, request, top=top)
    with Output(output or beside(trace, "report.html"), force=force) as file:
        file.text(render(view))


@contextmanager
def report_after(trace: Path, *, force: bool, quiet: bool) -> Iterator[None]:
    """Write the report of the trace that the body records; check before the body that it can be written.

    Raises:
        ConfigError: The report's file exists and `force` is off.
        BackendError: No Plotly.
    """
    from sfi_traces.report import check_report, render

    check_report()
    path = beside(trace, "report.html")
    _make(path.parent)
    with Output(path, force=force, quiet=quiet) as file:
        yield
        if file.path is not None:  # None on all ranks but the first
            file.text(render(open_view(trace, None)))


def beside(trace: Path, name: str) -> Path:
    """Name a file after a trace, in the trace's parent folder."""
    folder = trace.resolve()
    # the parent as the user wrote it, unless the trace is a path such as `.`
    place = trace.parent if trace.name == folder.name else folder.parent
    return place / f"{folder.name}-{name}"


def open_view(
    trace: Path,
    request: int | None,
    layer: int | None = None,
    head: int | None = None,
    top: int | None = None,
) -> Any:
    """Open a trace and choose the part to show; tell the user about other requests.

    Raises:
        ConfigError: The trace has no such request, layer, head or support.
        TraceError: No trace, or one without a step.
    """
    from sfi_traces.model.trace import Trace
    from sfi_traces.views.view import View

    view = View(Trace.open(trace), request, layer, head, top)
    if request is None and len(view.requests) > 1:
        message(
            f"showing request {view.request} of {len(view.requests)}; --request chooses another"
        )
    return view


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SfiError(f"output {folder} cannot be made: {error.strerror}") from error
