"""The spans are OTLP's, by its own reader, and say what the trace says."""

import base64
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from sfi_cli.app import app
from sfi_core.errors import TraceError
from sfi_traces import Trace
from sfi_traces.export.otlp import otlp_text
from tests.traces.made import make_trace
from tests.traces.small import change_manifest, rows, write_trace
from tests.traces.test_stability import rewrite

IDS = ("traceId", "spanId", "parentSpanId")
BEGAN = 1_700_000_000_123_456_789


def exported(trace: Trace) -> list[str]:
    return list(otlp_text(trace, lambda done, total: None))


def read(lines: list[str]) -> list[Any]:
    """Read the lines as OpenTelemetry's own messages; whatever these do not know fails.

    OTLP differs from protobuf's JSON in one thing: ids are hexadecimal, and not base64.
    """
    proto = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
    json_format = pytest.importorskip("google.protobuf.json_format")
    found = []
    for line in lines:
        document = json.loads(line)
        message = json_format.ParseDict(_ids(document, _to_base64), proto.TracesData())
        told = json_format.MessageToDict(message, use_integers_for_enums=True)
        assert _ids(told, _to_hex) == document
        found += message.resource_spans
    return found


def _to_base64(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text)).decode()


def _to_hex(text: str) -> str:
    return base64.b64decode(text).hex()


def _ids(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_ids(one, change) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: change(one) if name in IDS else _ids(one, change) for name, one in value.items()}


def told(attributes: Any) -> dict[str, Any]:
    """Return attributes as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def spans_of(lines: list[str]) -> list[tuple[dict[str, Any], Any]]:
    """Return each span with what its resource says."""
    return [
        (told(one.resource.attributes), span)
        for one in read(lines)
        for scope in one.scope_spans
        for span in scope.spans
    ]


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    """A run of two ranks, with more spans than a line has."""
    folder = tmp_path_factory.mktemp("otlp") / "run"
    more = {"ranks": 2, "began_unix_ns": BEGAN, "max_new_tokens": 45}
    for rank, path in enumerate((folder, folder / "rank-00001")):
        make_trace(path, steps=45, policy="sfi", sentence=9, rank=rank, **more)
        rewrite(path, "timings", lambda found, rank=rank: [row | {"rank": rank} for row in found])
    return Trace.open(folder)


def test_opentelemetry_reads_a_root_a_step_and_a_phase_for_every_row(trace, monkeypatch):
    monkeypatch.setattr("sfi_traces.export.otlp.LINE", 100)
    lines = exported(trace)
    assert {len(one.scope_spans[0].spans) for one in read(lines)} > {100}
    spans = spans_of(lines)
    steps, timings = rows(trace, "steps"), rows(trace, "timings")
    assert len(spans) == 1 + len(steps) + len(timings)
    assert {(len(span.trace_id), len(span.span_id)) for _, span in spans} == {(16, 8)}
    by_id = {span.span_id: span for _, span in spans}
    assert len(by_id) == len(spans)
    (root,) = (span for _, span in spans if not span.parent_span_id)
    assert (root.name, root.kind) == ("text_completion made-up", 1)
    assert {span.trace_id for _, span in spans} == {root.trace_id}
    for _, span in spans:
        parent = by_id[span.parent_span_id] if span.parent_span_id else span
        assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        if not span.name.startswith(
            ("pack", "attention")
        ):  # the made-up ones reach over each other
            assert span.end_time_unix_nano <= parent.end_time_unix_nano


def test_a_root_follows_the_genai_conventions(trace):
    (root,) = (span for _, span in spans_of(exported(trace)) if not span.parent_span_id)
    steps = rows(trace, "steps")
    read, context = (
        sum(step[name] for step in steps if step["step"])
        for name in ("attended_tokens", "context_tokens")
    )
    assert told(root.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "sfi",
        "gen_ai.request.model": "made-up",
        "gen_ai.request.max_tokens": 45,
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.output_tokens": 45,
        "sfi.request": 0,
        "sfi.slow_steps": sum(step["slow"] for step in steps),
        "sfi.read_ratio": pytest.approx(read / context),
    }


def test_steps_and_phases_say_what_their_rows_say(trace):
    spans = spans_of(exported(trace))
    steps = [span for _, span in spans if span.name in ("slow step", "fast step")]
    for row, span in zip(rows(trace, "steps"), steps, strict=True):
        found = told(span.attributes)
        assert span.name == ("slow step" if row["slow"] else "fast step")
        for name in ("step", "slow", "attended_tokens", "context_tokens", "audited"):
            assert found[f"sfi.{name}"] == row[name]
        assert found.get("sfi.reason", "") == row["reason"]
    step_of = {span.span_id: told(span.attributes)["sfi.step"] for span in steps}
    parents = {span.span_id: span.parent_span_id for _, span in spans}
    phases = [one for one in spans if "sfi.stream" in told(one[1].attributes)]
    found = []
    for resource, span in phases:
        above = span.parent_span_id
        while above not in step_of:
            above = parents[above]
        begin_ns = span.start_time_unix_nano - BEGAN
        layer = told(span.attributes).get("sfi.layer")
        found.append((resource["sfi.rank"], step_of[above], span.name, layer, begin_ns))
    timings = [
        (row["rank"], row["step"], row["name"], row["layer"], round(1000 * row["begin_us"]))
        for row in rows(trace, "timings")
    ]
    assert sorted(found, key=str) == sorted(timings, key=str)
    layers = [span for _, span in phases if span.name == "attention.fast"]
    names = {span.span_id: span.name for _, span in spans}
    assert {names[span.parent_span_id] for span in layers} == {"forward"}


def test_a_step_says_what_the_batch_did(tmp_path):
    shape = {"graphs": True, "slow_requests": 1, "fast_requests": 3, "cached_tokens": 700,
             "moved_bytes": 4096, "bandwidth_share": 0.5}  # fmt: skip
    given = {"request": 0, "step": 0, "slow": False, **shape}
    timing = {"request": 0, "step": 0, "name": "forward", "stream": "main",
              "begin_us": 0.0, "elapsed_us": 9.0}  # fmt: skip
    trace = Trace.open(write_trace(tmp_path / "run", {"steps": [given], "timings": [timing]}))
    (step,) = (span for _, span in spans_of(exported(trace)) if span.name == "fast step")
    found = told(step.attributes)
    assert {name: found[f"sfi.{name}"] for name in shape} == shape


def test_requests_of_a_batch_link_to_the_one_that_has_the_phases(tmp_path):
    steps = [{"request": r, "step": s, "slow": s == 0} for r in (0, 1) for s in (0, 1)]
    timings = [
        {
            "request": 0, "step": step, "layer": None, "name": "forward", "stream": "main",
            "begin_us": 10.0 * step, "elapsed_us": 8.0,
        }
        for step in (0, 1)
    ]  # fmt: skip
    tables = {"steps": steps, "timings": timings}
    found = [
        span for _, span in spans_of(exported(Trace.open(write_trace(tmp_path / "run", tables))))
    ]
    assert len({span.trace_id for span in found}) == 2
    first, second = ([span for span in found if span.trace_id == one] for one in dict.fromkeys(
        span.trace_id for span in found
    ))  # fmt: skip
    assert [span.name for span in first if span.name == "forward"] == ["forward", "forward"]
    links = [link for span in second for link in span.links]
    assert [(link.trace_id, link.span_id) for link in links] == [
        (span.trace_id, span.span_id) for span in first if span.name.endswith("step")
    ]


def test_ids_are_the_same_at_every_export_and_others_for_another_run(tmp_path):
    first, second = (make_trace(tmp_path / name, steps=3, policy="sfi") for name in "ab")
    assert exported(Trace.open(first)) == exported(Trace.open(second))
    change_manifest(second, run_id="7" * 32)
    one, two = (
        {span.span_id for _, span in spans_of(exported(Trace.open(path)))}
        for path in (first, second)
    )
    assert len(one) == len(two)
    assert not one & two


def test_an_older_trace_has_ids_and_a_time_to_the_second(tmp_path):
    folder = make_trace(tmp_path / "run", steps=3, policy="sfi")
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("run_id", "began_unix_ns", "rank", "ranks"):
        del manifest[name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (root,) = (
        span for _, span in spans_of(exported(Trace.open(folder))) if not span.parent_span_id
    )
    assert root.start_time_unix_nano == 1_795_255_200 * 10**9
    assert exported(Trace.open(folder)) == exported(Trace.open(folder))


def test_without_timings_there_are_no_spans(tmp_path):
    steps = [{"request": 0, "step": 0, "slow": True}]
    trace = Trace.open(write_trace(tmp_path / "run", {"steps": steps}))
    with pytest.raises(TraceError, match="has no timings, which spans are made of"):
        exported(trace)


def test_the_command_writes_lines_to_a_file_or_stdout(tmp_path):
    folder = make_trace(tmp_path / "run", steps=3, policy="sfi")
    words = ["trace", "export", str(folder), "--format", "otlp", "--quiet"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert done.stdout == "".join(exported(Trace.open(folder)))
    CliRunner().invoke(app, [*words, "-o", str(tmp_path / "spans.jsonl.gz")])
    assert gzip.decompress((tmp_path / "spans.jsonl.gz").read_bytes()).decode() == done.stdout
