"""Traces of runs in which requests begin where others have ended: as if each had run alone."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

import sfi_core
from sfi_core import SfiConfig
from sfi_core.settings.engine import AuditConfig, EngineOptions
from sfi_traces.export.perfetto import perfetto_text
from sfi_traces.model.check import check
from sfi_traces.model.trace import Trace
from sfi_traces.record.parquet import ParquetObserver
from tests.core.conftest import tiny_qwen3
from tests.traces.small import section

CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=6, budget=5, t_max=4,
    trigger_token_ids=tuple(range(0, 96, 3)), window_prefill=4,
)  # fmt: skip
ROWS = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 30, 4, 17, 40, 6)]
LIMITS = [8, 3, 9, 1, 6, 5]
# what differs from the request alone
ITS_OWN = ("request", "elapsed_us", "batch_step", "slow_requests", "fast_requests", "cached_tokens", "moved_bytes")


@cache
def model() -> Any:
    return tiny_qwen3()


def record(numbers: list[int], **options: Any) -> Trace:
    folder = Path(mkdtemp()) / "trace"
    with ParquetObserver(folder, positions=True) as observer:
        complete(numbers, observer, **options)
    return Trace.open(folder)


def complete(numbers: list[int], observer: ParquetObserver, **options: Any) -> Any:
    return sfi_core.generate(
        model(), None, [ROWS[n] for n in numbers], options.pop("config", CONFIG), stop_token_ids=(),
        max_new_tokens=[LIMITS[n] for n in numbers], observers=[observer],
        audit=AuditConfig(every=2, top=6), **options,
    )  # fmt: skip


@cache
def continuous() -> Trace:
    return record([*range(6)], max_batch=2, engine=EngineOptions(prefill_chunk=16))


def rows(trace: Trace, table: str, request: int) -> list[dict[str, Any]]:
    found = [row for row in trace.table(table).to_pylist() if row["request"] == request]
    return [{key: row[key] for key in row if key not in ITS_OWN} for row in found]


@pytest.mark.parametrize("request_number", [0, 2, 5])
def test_a_requests_rows_are_those_of_the_request_alone(request_number):
    alone = record([request_number], engine=EngineOptions(prefill_chunk=16))
    for table in ("prompts", "steps", "selections", "supports", "logits"):
        found, expected = rows(continuous(), table, request_number), rows(alone, table, 0)
        for ours, theirs in zip(found, expected, strict=True):
            for name, value in theirs.items():
                number = isinstance(value, float) or name == "mass"  # a batch may round otherwise
                wanted = pytest.approx(value, rel=1e-3, abs=1e-5) if number else value
                assert ours[name] == wanted, (table, name)


def test_it_is_sound():
    document = check(continuous())
    assert (document["sound"], document["problems"], document["notes"]) == (True, [], [])
    assert document["steps_checked"]
    assert [row["steps"] for row in document["recorded"]] == LIMITS


def test_every_request_has_a_step_of_the_batch_for_each_of_its_own():
    steps = continuous().table("steps").to_pylist()
    for number in range(6):
        own = [row["batch_step"] for row in steps if row["request"] == number]
        assert own == sorted(set(own))
    passes = {row["batch_step"]: row["elapsed_us"] for row in steps}
    assert sorted(passes) == list(range(len(passes)))
    for row in steps:
        assert row["elapsed_us"] == passes[row["batch_step"]]


def test_latency_counts_each_prompt_and_each_step_of_the_batch_once():
    found = section(continuous(), "latency")
    steps = continuous().table("steps").to_pylist()
    decoding = {row["batch_step"]: row["elapsed_us"] for row in steps if row["step"]}
    expected = sum(row["step"] > 0 for row in steps) / (sum(decoding.values()) / 1e6)
    assert found["tokens_per_second"] == pytest.approx(expected)
    prefill = [kind for kind in found["kinds"] if kind["kind"] == "prefill"]
    assert [kind["n"] for kind in prefill] == [5]  # 0 and 1 together, then four alone


def test_time_of_later_prompts_is_the_prefills():
    parts = section(continuous(), "phases")
    timings = continuous().table("timings").to_pylist()
    reading = {row["step"] for row in timings if row["name"] == "prefill"}
    assert len(reading) == 1 + 1 + 4  # of the first two an earlier piece, -1, and the last
    for part, wanted in (("prefill", True), ("decode", False)):
        for phase in parts[part]:
            spent = [
                row["elapsed_us"]
                for row in timings
                if row["name"] == phase["name"] and (row["step"] in reading) is wanted
            ]
            if phase["name"] != "other":
                assert phase["total_us"] == pytest.approx(sum(spent))


@pytest.mark.parametrize("number", [0, 2, 4])
def test_of_one_request_only_the_steps_it_took_part_in_are_summed_up(number):
    timings = continuous().table("timings").to_pylist()
    steps = continuous().table("steps").to_pylist()
    own = {row["batch_step"] for row in steps if row["request"] == number}
    decoding = section(continuous(), "phases", number)["decode"]
    (sampling,) = [phase for phase in decoding if phase["name"] == "sample"]
    first = min(own)  # its prompt's
    spent = [row["elapsed_us"] for row in timings if row["name"] == "sample" and row["step"] in own - {first}]
    assert (sampling["spans"], len(spent)) == (LIMITS[number] - 1,) * 2
    assert sampling["total_us"] == pytest.approx(sum(spent))


def test_the_timeline_shows_each_step_where_its_spans_are():
    text = "".join(perfetto_text(continuous(), lambda done, total: None))
    events = json.loads(text)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    for number in range(6):
        own = [e for e in slices if tracks[e["tid"]] == f"steps of request {number}"]
        assert [event["args"]["step"] for event in own] == list(range(LIMITS[number]))
        for first, second in pairwise(own):
            assert first["ts"] + first["dur"] <= second["ts"] + 0.001
    began = {
        number: min(e["ts"] for e in slices if tracks[e["tid"]] == f"steps of request {number}") for number in range(6)
    }
    assert began[0] == began[1] < began[2] < began[3] < began[4] < began[5]
