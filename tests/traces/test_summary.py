"""The numbers of `sfi trace show`, against plain loops over the rows."""

import statistics
from collections import Counter, defaultdict

import numpy as np
import pytest

from sfi_core.errors import TraceError
from sfi_traces.model.trace import Trace
from sfi_traces.summary import summarize
from tests.traces.made import CONFIG, LAYERS, TOP, make_trace, overlap
from tests.traces.small import assert_spread, change_manifest, fixed_trace, redact, rows, section, write_trace

sparse = fixed_trace(steps=50, requests=2, policy="sfi", sentence=9)


def test_steps_by_reason_and_what_they_read(sparse):
    steps = rows(sparse, "steps")
    later = [row for row in steps if row["step"]]
    fast = [row for row in steps if not row["slow"]]
    summary = section(sparse, "steps")
    assert (summary["steps"], summary["slow"], summary["fast"]) == (100, 100 - len(fast), len(fast))
    assert summary["reasons"] == dict(Counter(row["reason"] for row in steps if row["slow"]))
    assert summary["slow_share"] == pytest.approx(summary["slow"] / summary["steps"])
    read = [row["attended_tokens"] for row in later]
    assert summary["mean_attended_tokens"] == pytest.approx(np.mean(read))
    assert summary["read_ratio"] == pytest.approx(sum(read) / sum(row["context_tokens"] for row in later))
    # what choosing read is a null column, as in traces of older versions
    assert (summary["selection_ratio"], summary["mean_selection_tokens"]) == (None, None)
    assert (summary["cache_read_ratio"], summary["fast_cache_read_ratio"]) == (
        summary["read_ratio"],
        summary["fast_read_ratio"],
    )
    assert summary["fast_read_ratio"] == pytest.approx(
        sum(row["attended_tokens"] for row in fast) / sum(row["context_tokens"] for row in fast)
    )


@pytest.mark.parametrize("delay", [0, 1])
def test_tokens_that_end_a_sentence_and_whether_a_slow_step_followed(tmp_path, delay):
    """The step asked is the one after the token, the delay later; beyond the end there is none."""
    tokens = [7, 3, 5, 7, 5, 3, 7]  # 3 and 7 are triggers
    slow = [True, True, False, True, False, False, True]
    trace = write_trace(
        tmp_path / "run",
        {
            "steps": [
                {
                    "request": request, "step": step, "slow": is_slow, "token_id": token,
                    "token_text": f"<{token}>", "trigger": token != 5,
                }
                for request in range(2)
                for step, (token, is_slow) in enumerate(zip(tokens, slow, strict=True))
            ]
        },
        config=CONFIG | {"trigger_delay": delay},
    )  # fmt: skip
    followed = defaultdict(list)
    for step, token in enumerate(tokens):
        if step + 1 + delay < len(slow):
            followed[token].append(slow[step + 1 + delay])
    assert section(Trace.open(trace), "triggers") == [
        {"token_id": 7, "token_text": "<7>", "count": 6, "slow_after": statistics.mean(followed[7])},
        {"token_id": 3, "token_text": "<3>", "count": 4, "slow_after": statistics.mean(followed[3])},
    ]


def test_one_request_and_one_layer(sparse):
    summary = summarize(sparse, request=1, layer=0)
    assert summary["steps"]["steps"] == 50
    assert [layer["layer"] for layer in summary["stability"]["layers"]] == [0]
    (only,) = summary["stability"]["layers"]
    assert rounded(only["within"]) == rounded(summary["stability"]["within"])
    values = [
        row["query_cosine"] for row in rows(sparse, "supports")
        if (row["request"], row["layer"]) == (1, 0) and row["query_cosine"] is not None
    ]  # fmt: skip
    assert_spread(summary["audit"]["query_cosine"], values)
    assert summary["selections"]["rows"] == sum(
        (row["request"], row["layer"]) == (1, 0) for row in rows(sparse, "selections")
    )
    assert summary["logits"]["kl_next_token"]["n"] == sum(r["request"] for r in rows(sparse, "logits"))
    assert rounded(summary["phases"]) == rounded(section(sparse, "phases", 1))  # time is not a layer's
    assert summary["run"]["requests"] == [{"request": 1, "prompt_tokens": 200, "steps": 50}]


def rounded(value):
    """DuckDB's threads add up in any order."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 6) if isinstance(value, float) else value


def test_a_redacted_trace_has_the_same_numbers(tmp_path, sparse):
    folder = make_trace(tmp_path / "run", steps=50, requests=2, policy="sfi", sentence=9)
    redacted, whole = summarize(Trace.open(redact(folder))), summarize(sparse)
    count = sum(trigger["count"] for trigger in whole["triggers"])
    assert redacted["triggers"] == [{"token_id": None, "token_text": None, "count": count, "slow_after": 1.0}]
    for name in ("stability", "audit", "logits", "selections", "steps"):
        assert rounded(redacted[name]) == rounded(whole[name])


def test_what_was_not_recorded_is_named_with_the_option_that_records_it(tmp_path):
    trace = Trace.open(make_trace(tmp_path / "run", steps=20, audit=None))
    summary = summarize(trace)
    empty = (
        "stability", "drift", "head_similarity", "query_cosine", "audit", "logits", "selections",
    )  # fmt: skip
    assert [summary[name] for name in empty] == [None] * len(empty)
    assert summary["corrections"] is summary["recalls"] is None  # few policies have them: no line
    assert [line for line in summary["missing"] if "--audit" in line] == summary["missing"][:-1]
    assert "--policy sfi" in summary["missing"][-1]
    assert len(summary["missing"]) == len(empty)
    assert summary["phases"] is not None


def test_an_audit_of_some_steps_only_has_pairs_where_both_were_audited(tmp_path):
    """Here no writer noted overlaps of consecutive steps; a real one does after a slow step."""
    summary = summarize(Trace.open(make_trace(tmp_path / "run", steps=40, audit=4, policy="sfi")))
    assert summary["stability"] is None
    assert summary["missing"] == ["overlap of consecutive supports (record with --audit 1)"]


def test_a_killed_trace_is_summed_up_as_far_as_it_goes(tmp_path):
    folder = make_trace(tmp_path / "run", steps=30, policy="sfi")
    for name in ("timings", "logits"):
        for part in Trace.open(folder).parts(name):
            part.unlink()
    document = summarize(Trace.open(change_manifest(folder, finished=None, prompts=[])))
    assert document["run"]["finished"] is None
    assert document["run"]["requests"] == [{"request": 0, "prompt_tokens": None, "steps": 30}]
    assert (document["phases"], document["logits"]) == (None, None)
    assert document["latency"]["kinds"]


def test_supports_of_steps_that_were_not_finished_do_not_count(tmp_path):
    """Parts of `steps` are written last."""
    place = {"request": 0, "layer": 0, "head": 0, "positions": [1], "mass": [1.0], "retained_mass": 0.5}
    trace = write_trace(
        tmp_path / "run",
        {
            "steps": [{"request": 0, "step": step, "slow": not step} for step in range(3)],
            "supports": [{**place, "step": step} for step in range(6)],
        },
    )
    assert section(Trace.open(trace), "audit")["retained_mass"]["n"] == 2


def test_a_trace_without_a_finished_step_is_refused(tmp_path):
    with pytest.raises(TraceError, match="has no finished step"):
        summarize(Trace.open(write_trace(tmp_path / "run", {})))


def steps_by_key(trace: Trace) -> dict[tuple[int, int], dict]:
    return {(row["request"], row["step"]): row for row in rows(trace, "steps")}


def test_overlap_within_sentences_and_across_boundaries(sparse):
    """Recomputed from the positions: a pair is across if its steps are of different sentences."""
    steps = steps_by_key(sparse)
    pairs: dict[tuple, list[float]] = defaultdict(list)
    places: dict = defaultdict(dict)
    for row in rows(sparse, "supports"):
        places[row["request"], row["layer"], row["head"]][row["step"]] = row["positions"]
    for (number, layer, _), lists in places.items():
        for step in range(1, len(lists)):
            across = steps[number, step]["sentence"] != steps[number, step - 1]["sentence"]
            value = overlap(lists[step - 1], lists[step])
            pairs[layer, across].append(value)
            pairs["all", across].append(value)
    stability = section(sparse, "stability")
    assert_spread(stability["within"], pairs["all", False])
    assert_spread(stability["across"], pairs["all", True])
    held = [TOP / steps[key]["context_tokens"] for key in steps if key[1]]
    assert stability["chance"] == pytest.approx(np.mean(held))
    assert [of_layer["layer"] for of_layer in stability["layers"]] == list(range(LAYERS))
    for of_layer in stability["layers"]:
        assert_spread(of_layer["within"], pairs[of_layer["layer"], False])
        assert_spread(of_layer["across"], pairs[of_layer["layer"], True])


def test_retained_mass_counts_fast_steps_only_and_the_worst_head_comes_first(sparse):
    steps = steps_by_key(sparse)
    by_head, by_layer = defaultdict(list), defaultdict(list)
    for row in rows(sparse, "supports"):
        if not steps[row["request"], row["step"]]["slow"]:
            by_head[row["layer"], row["head"]].append(row["retained_mass"])
            by_layer[row["layer"]].append(row)
    audit = section(sparse, "audit")
    assert_spread(audit["retained_mass"], [v for values in by_head.values() for v in values])
    assert_spread(audit["output_error"], [r["output_error"] for v in by_layer.values() for r in v])
    for layer in audit["layers"]:
        assert_spread(layer["retained_mass"], [r["retained_mass"] for r in by_layer[layer["layer"]]])
    means = {place: np.mean(values) for place, values in by_head.items()}
    assert [(h["layer"], h["head"]) for h in audit["heads"]] == sorted(means, key=means.__getitem__)
    for head in audit["heads"]:
        assert_spread(head["retained_mass"], by_head[head["layer"], head["head"]])


def test_next_token_divergence_and_agreement(sparse):
    summary, logits = section(sparse, "logits"), rows(sparse, "logits")
    assert_spread(summary["kl_next_token"], [row["kl_next_token"] for row in logits])
    assert summary["argmax_agreement"] == pytest.approx(sum(r["argmax_agrees"] for r in logits) / len(logits))


def test_selections_and_how_often_lambda_is_clipped(sparse):
    summary, selections = section(sparse, "selections"), rows(sparse, "selections")
    assert summary["rows"] == len(selections)
    assert_spread(summary["lambda_star"], [row["lambda_star"] for row in selections])
    for name in ("overlap_previous", "jaccard_previous"):
        assert_spread(summary[name], [row[name] for row in selections if row[name] is not None])
    clipped = sum(abs(row["lambda_star"] - 0.02) < 1e-6 for row in selections)
    assert 0 < clipped < len(selections)
    assert summary["clipped_share"] == pytest.approx(clipped / len(selections))


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
    by_kind = kinds(trace)
    assert list(by_kind) == ["prefill", "slow", "fast"]
    for kind, slow in (("slow", True), ("fast", False)):
        times = [row["elapsed_us"] for row in steps if row["step"] and row["slow"] is slow]
        p50, p95, p99 = np.quantile(times, [0.5, 0.95, 0.99])
        expected = {"n": len(times), "mean_us": np.mean(times), "p50_us": p50, "p95_us": p95, "p99_us": p99}
        assert {name: by_kind[kind][name] for name in expected} == pytest.approx(expected)
        assert by_kind[kind]["audited"] is False
    assert (by_kind["prefill"]["n"], by_kind["prefill"]["p50_us"]) == (1, steps[0]["elapsed_us"])
    document = section(Trace.open(trace), "latency")
    assert document["tokens_per_second"] == pytest.approx(59e6 / sum(r["elapsed_us"] for r in steps[1:]))
    assert document["audited"] is False


def test_steps_that_the_audit_slowed_down_are_left_out_where_others_are_there(tmp_path):
    rows = [step(0, 0, True, 900.0, audited=True)]
    rows += [step(0, n, False, 100.0 + n, audited=n % 4 == 0) for n in range(1, 12)]
    rows += [step(0, 12, True, 700.0, audited=True)]
    by_kind = kinds(write_trace(tmp_path / "run", {"steps": rows}))
    unaudited = [100.0 + n for n in range(1, 12) if n % 4]
    assert (by_kind["fast"]["n"], by_kind["fast"]["audited"]) == (len(unaudited), False)
    assert by_kind["fast"]["p50_us"] == np.median(unaudited)
    assert (by_kind["slow"]["n"], by_kind["slow"]["audited"]) == (1, True)


def test_steps_of_two_runs_that_took_equally_long_count_twice(tmp_path):
    """Requests 0 and 1 ran together, 2 in a run of its own, whose step 1 took as long to the microsecond."""
    rows = [step(request, n, n == 0, 100.0) for request in range(3) for n in range(2)]
    timings = [span(n, "forward", 50.0, layer=None, request=run) for run in (0, 2) for n in range(2)]
    by_kind = kinds(write_trace(tmp_path / "run", {"steps": rows, "timings": timings}))
    assert (by_kind["prefill"]["n"], by_kind["fast"]["n"]) == (2, 2)


@pytest.mark.parametrize("request_only", [None, 1])
def test_a_batch_counts_once_and_may_be_mixed(tmp_path, request_only):
    """Requests 0 and 1 ran together, 2 alone."""
    slow = {0: [True, False, True, False], 1: [True, False, False, True]}
    times = [1000.0, 110.0, 510.0, 520.0]
    rows = [step(r, n, slow[r][n], times[n]) for r in slow for n in range(4)]
    rows += [step(2, 0, True, 800.0), step(2, 1, False, 90.0)]
    trace = write_trace(tmp_path / "run", {"steps": rows})
    document = section(Trace.open(trace), "latency", request_only)
    by_kind = {kind["kind"]: (kind["n"], kind["mean_us"]) for kind in document["kinds"]}
    if request_only is None:
        assert by_kind == {"prefill": (2, 900.0), "fast": (2, 100.0), "mixed": (2, 515.0)}
        assert document["tokens_per_second"] == pytest.approx(7e6 / (110 + 510 + 520 + 90))
    else:
        assert by_kind == {"prefill": (1, 1000.0), "fast": (1, 110.0), "mixed": (2, 515.0)}
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
    phases = section(Trace.open(trace), "phases")
    prefill = {phase["name"]: (phase["total_us"], phase["step_us"]) for phase in phases["prefill"]}
    assert prefill == {"attention.dense": (150.0, 75.0), "sample": (20.0, 20.0), "other": (650.0, 325.0)}
    assert {phase["name"]: phase["share"] for phase in phases["prefill"]} == pytest.approx(
        {"attention.dense": 150 / 820, "sample": 20 / 820, "other": 650 / 820}
    )
    decode = {phase["name"]: (phase["total_us"], phase["step_us"], phase["spans"]) for phase in phases["decode"]}
    assert decode == {
        "attention.fast": (36.0, 18.0, 3), "shadow": (60.0, 60.0, 1), "pack": (40.0, 40.0, 1),
        "audit": (30.0, 30.0, 1), "sample": (10.0, 5.0, 2), "other": (104.0, 52.0, None),
    }  # fmt: skip
    whole = 80 + 90 + 10 + 60
    shares = {phase["name"]: phase["share"] for phase in phases["decode"]}
    assert shares["other"] == pytest.approx(104 / whole)
    assert sum(share for name, share in shares.items() if name != "pack") == pytest.approx(1)


def test_a_request_that_ended_with_its_prompt_has_no_speed(tmp_path):
    rows = [step(5, n, not n, 1.0) for n in range(3)] + [step(6, 0, True, 1.0)]
    timings = [span(n, "attention.fast", 5.0, request=5) for n in range(3)]
    ended = write_trace(tmp_path / "ended", {"steps": rows, "timings": timings})
    summary = summarize(Trace.open(ended), request=6)
    assert summary["steps"]["read_ratio"] is None
    assert summary["latency"]["tokens_per_second"] is None
