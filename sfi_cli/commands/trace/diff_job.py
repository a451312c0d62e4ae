"""`sfi trace diff` after its options are read."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from sfi_cli.commands.trace.diff_views import diff_text
from sfi_cli.terminal.output import Output, message
from sfi_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffJob:
    """The options of `sfi trace diff`.

    Attributes:
        first: Folder of A.
        second: Folder of B.
        request: The request, or None for all.
        limits: Conditions that must not hold, as the user wrote them.
        report: The HTML file, or None.
    """

    first: Path
    second: Path
    request: int | None
    limits: tuple[str, ...]
    report: Path | None
    output: Path | None
    json: bool
    force: bool

    def run(self) -> None:
        """Compare the traces, write the comparison, and judge the limits.

        Raises:
            ConfigError: A limit, request or file is invalid.
            TraceError: The traces cannot be compared, or lack a limit's number.
            BackendError: A report without Plotly.
            typer.Exit: With 1 if a limit holds.
        """
        from sfi_traces.model.trace import Trace
        from sfi_traces.summary.diff import compare
        from sfi_traces.summary.diff_metrics import Limit

        if self.report and self.output and self.report.resolve() == self.output.resolve():
            raise ConfigError(f"report and output must be two files, got {self.report} for both")
        limits = [Limit.parse(text) for text in self.limits]
        traces = Trace.open(self.first), Trace.open(self.second)
        with ExitStack() as stack:
            written = stack.enter_context(Output(self.output, json=self.json, force=self.force))
            page = self._page(stack)
            document = compare(*traces, self.request)
            met = [(limit, limit.value_of(document)) for limit in limits if limit.meets(document)]
            written.data(document, diff_text)
            if page is not None:
                page.text(self._report(document))
        for limit, value in met:
            message(f"failed: {limit.text}, {limit.name} is {value:.6g}")
        if met:
            raise typer.Exit(1)

    def _page(self, stack: ExitStack) -> Output | None:
        if self.report is None:
            return None
        from sfi_traces.report import check_report

        check_report()
        return stack.enter_context(Output(self.report, force=self.force))

    def _report(self, document: dict[str, Any]) -> str:
        from sfi_cli.commands.trace.figure_jobs import open_view
        from sfi_traces.report.diff_page import render_diff

        request = document["requests"][0]["request"] if self.request is None else self.request
        if len(document["requests"]) > 1:
            message(
                f"the report shows request {request} of {len(document['requests'])}; "
                "--request chooses another"
            )
        return render_diff(
            open_view(self.first, request), open_view(self.second, request), document
        )
