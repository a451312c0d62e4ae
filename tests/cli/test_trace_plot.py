"""`sfi trace plot` and `sfi trace report`: which files come, and what is refused."""

import pytest

from sfi_cli.commands.trace.report import plot, report
from sfi_core.errors import ConfigError, TraceError
from tests.cli.trace_commands import trace as command
from tests.traces.made import make_trace

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")
KINDS = ["heatmap", "lag", "lambda", "retained", "timeline"]


@pytest.fixture
def trace(tmp_path):
    return make_trace(tmp_path / "run", steps=15, policy="sfi", sentence=5)


@pytest.mark.exhaustive
def test_plot_and_report_write_beside_the_trace(trace, tmp_path):
    result = command("plot", trace)
    assert (result.code, result.stdout) == (0, "")
    wrote = [f"Wrote {tmp_path}/run-{kind}.png" for kind in KINDS]
    assert sorted(result.stderr.splitlines()) == sorted(wrote)
    with pytest.raises(ConfigError, match=f"output {tmp_path}/run-heatmap.png exists; add --force"):
        plot(trace)
    result = command("report", trace)
    assert (result.code, result.stderr) == (0, f"Wrote {tmp_path}/run-report.html\n")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(["run", "run-report.html", *(f"run-{kind}.png" for kind in KINDS)])


def test_kinds_go_to_a_folder_in_the_format_asked_for(trace, tmp_path):
    plot(trace, kind=["lag", "lambda", "lag"], form="svg", output=tmp_path / "new" / "figures")
    names = sorted(path.name for path in (tmp_path / "new" / "figures").iterdir())
    assert names == ["run-lag.svg", "run-lambda.svg"]
    assert "Weight of the prior" in (tmp_path / "new" / "figures" / "run-lambda.svg").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": ["heat"]}, r"unknown kind 'heat'; did you mean 'heatmap'\? expected one of \('heatmap', 'lag', "),
        ({"form": "pdf"}, r"unknown format 'pdf'; expected one of \('png', 'svg'\)"),
        ({"request": 1}, r"request must be one of \[0\], got 1"),
        ({"layer": 5}, "layer must be one of 0 to 1, got 5"),
        ({"head": 2}, "head must be one of 0 to 1, got 2"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(trace, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        plot(trace, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_figures_without_data_are_left_out_unless_asked_for(tmp_path, capsys):
    trace = make_trace(tmp_path / "run", steps=6, audit=None)
    plot(trace, output=tmp_path / "figures")
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["run-timeline.png"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5
    assert said[0].startswith("left out heatmap: trace ")
    assert said[0].endswith("has no audit; record it with --audit 1")
    with pytest.raises(TraceError, match="record it with --audit 1"):
        plot(trace, kind=["timeline", "lag"], output=tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["run-timeline.png"]


def test_the_report_overwrites_only_when_told(trace, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    with pytest.raises(ConfigError, match="exists; add --force"):
        report(trace, output=page)
    assert page.read_text() == "mine"
    report(trace, request=0, output=page, force=True)
    assert "Top-24 of dense attention" in page.read_text(encoding="utf-8")
