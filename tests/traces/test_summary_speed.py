"""Latency and phases, against numbers worked out by hand."""

import numpy as np
import pytest

from sfi_traces.model.trace import Trace
from sfi_traces.summary import summarize
from tests.traces.made import make_trace
from tests.traces.small import section, write_trace


def step(request: int, number: int, slow: bool, elapsed_us: float, **more) -> dict:
    return {"request": request, "step": number, "slow": slow, "elapsed_us": elapsed_us, **more}


def span(number: int, name: str, elapsed_us: float, layer: int | None = 0, request: int = 0, **more) -> dict:
    return {
        "request": request, "step": number, "layer": layer, "name": name, "stream": "main", "begin_us": 0.0,
        "elapsed_us": elapsed_us, **more,
    }  # fmt: skip


def kinds(trace) -> dict[str, dict]:
    return {kind["kind"]: kind for kind in section(Trace.open(trace), "latency")["kinds"]}


def test_latency_has_percentiles_for_each_kind_of_step(tmp_path):
    trace = make_trace(tmp_path / "run", steps=60, policy="sfi", audit=None)
    steps = Trace.open(trace).table("steps").to_pylist()
    found = kinds(trace)
    assert list(found) == ["prefill", "slow", "fast"]
    for kind, slow in (("slow", True), ("fast", False)):
        times = [row["elapsed_us"] for row in steps if row["step"] and row["slow"] is slow]
        p50, p95, p99 = np.quantile(times, [0.5, 0.95, 0.99])
        expected = {"n": len(times), "mean_us": np.mean(times), "p50_us": p50, "p95_us": p95, "p99_us": p99}
        assert {name: found[kind][name] for name in expected} == pytest.approx(expected)
        assert found[kind]["audited"] is False
    assert (found["prefill"]["n"], found["prefill"]["p50_us"]) == (1, steps[0]["elapsed_us"])
    document = section(Trace.open(trace), "latency")
    assert document["tokens_per_second"] == pytest.approx(59e6 / sum(r["elapsed_us"] for r in steps[1:]))
    assert document["audited"] is False


def test_steps_that_the_audit_slowed_down_are_left_out_where_others_are_there(tmp_path):
    rows = [step(0, 0, True, 900.0, audited=True)]
    rows += [step(0, n, False, 100.0 + n, audited=n % 4 == 0) for n in range(1, 12)]
    rows += [step(0, 12, True, 700.0, audited=True)]
    found = kinds(write_trace(tmp_path / "run", {"steps": rows}))
    unaudited = [100.0 + n for n in range(1, 12) if n % 4]
    assert (found["fast"]["n"], found["fast"]["audited"]) == (len(unaudited), False)
    assert found["fast"]["p50_us"] == np.median(unaudited)
    assert (found["slow"]["n"], found["slow"]["audited"]) == (1, True)


def test_steps_of_two_runs_that_took_equally_long_count_twice(tmp_path):
    """Requests 0 and 1 ran together, 2 in a run of its own, whose step 1 took as long to the microsecond."""
    rows = [step(request, n, n == 0, 100.0) for request in range(3) for n in range(2)]
    timings = [span(n, "forward", 50.0, layer=None, request=run) for run in (0, 2) for n in range(2)]
    found = kinds(write_trace(tmp_path / "run", {"steps": rows, "timings": timings}))
    assert (found["prefill"]["n"], found["fast"]["n"]) == (2, 2)


@pytest.mark.parametrize("request_only", [None, 1])
def test_a_batch_counts_once_and_may_be_mixed(tmp_path, request_only):
    """Requests 0 and 1 ran together, 2 alone."""
    slow = {0: [True, False, True, False], 1: [True, False, False, True]}
    times = [1000.0, 110.0, 510.0, 520.0]
    rows = [step(r, n, slow[r][n], times[n]) for r in slow for n in range(4)]
    rows += [step(2, 0, True, 800.0), step(2, 1, False, 90.0)]
    trace = write_trace(tmp_path / "run", {"steps": rows})
    document = section(Trace.open(trace), "latency", request_only)
    found = {kind["kind"]: (kind["n"], kind["mean_us"]) for kind in document["kinds"]}
    if request_only is None:
        assert found == {"prefill": (2, 900.0), "fast": (2, 100.0), "mixed": (2, 515.0)}
        assert document["tokens_per_second"] == pytest.approx(7e6 / (110 + 510 + 520 + 90))
    else:
        assert found == {"prefill": (1, 1000.0), "fast": (1, 110.0), "mixed": (2, 515.0)}
        assert document["tokens_per_second"] == pytest.approx(3e6 / (110 + 510 + 520))


def test_phases_share_out_the_time_and_name_the_rest(tmp_path):
    trace = write_trace(
        tmp_path / "run",
        {
            "steps": [step(0, n, n == 0, 100.0) for n in range(3)],
            "timings": [
                span(-1, "prefill", 300.0, None), span(-1, "attention.dense", 50.0),
                span(0, "prefill", 500.0, None), span(0, "attention.dense", 100.0),
                span(0, "sample", 20.0, None),
                span(1, "forward", 80.0, None), span(1, "attention.fast", 10.0),
                span(1, "attention.fast", 12.0, 1), span(1, "sample", 5.0, None),
                span(2, "shadow", 60.0, None), span(2, "forward", 90.0, None),
                span(2, "attention.fast", 14.0), span(2, "audit", 30.0),
                span(2, "pack", 40.0, stream="stream 1"), span(2, "sample", 5.0, None),
            ],
        },
    )  # fmt: skip
    found = section(Trace.open(trace), "phases")
    prefill = {one["name"]: (one["total_us"], one["step_us"]) for one in found["prefill"]}
    assert prefill == {"attention.dense": (150.0, 75.0), "sample": (20.0, 20.0), "other": (650.0, 325.0)}
    assert {one["name"]: one["share"] for one in found["prefill"]} == pytest.approx(
        {"attention.dense": 150 / 820, "sample": 20 / 820, "other": 650 / 820}
    )
    decode = {one["name"]: (one["total_us"], one["step_us"], one["spans"]) for one in found["decode"]}
    assert decode == {
        "attention.fast": (36.0, 18.0, 3), "shadow": (60.0, 60.0, 1), "pack": (40.0, 40.0, 1),
        "audit": (30.0, 30.0, 1), "sample": (10.0, 5.0, 2), "other": (104.0, 52.0, None),
    }  # fmt: skip
    whole = 80 + 90 + 10 + 60
    shares = {one["name"]: one["share"] for one in found["decode"]}
    assert shares["other"] == pytest.approx(104 / whole)
    assert sum(share for name, share in shares.items() if name != "pack") == pytest.approx(1)


def test_a_request_that_ended_with_its_prompt_has_no_speed(tmp_path):
    rows = [step(5, n, not n, 1.0) for n in range(3)] + [step(6, 0, True, 1.0)]
    timings = [span(n, "attention.fast", 5.0, request=5) for n in range(3)]
    ended = write_trace(tmp_path / "ended", {"steps": rows, "timings": timings})
    found = summarize(Trace.open(ended), request=6)
    assert found["steps"]["read_ratio"] is None
    assert found["latency"]["tokens_per_second"] is None
