"""What a replay says was kept, against sets and loops."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from pyarrow import parquet

import sfi_core
from sfi_core import AuditConfig, SfiConfig, load
from sfi_core.bundled.example import load_example
from sfi_core.errors import TraceError
from sfi_core.policies.built_in.codescan import choosing_tokens
from sfi_traces import ParquetObserver, Trace
from sfi_traces.replay import RecordedVocabulary, Setting, Supports, compare, pareto, replay, replay_request, schedule
from sfi_traces.replay.replay import top
from tests.covering import first
from tests.small_example import small_example
from tests.traces.made import CONFIG, MODEL, PROMPT, STOP, TOP, make_trace
from tests.traces.small import fixed_trace, outcome, rewrite, rows

RULES = {"sink": 4, "recent": 16, "budget": 20, "t_max": 1000, "trigger_delay": 0}
trace = fixed_trace(requests=2, seed=3)


@pytest.fixture(scope="module")
def recorded(trace) -> list[Supports]:
    return Supports.load(trace)


def setting(**changes) -> Setting:
    """A trigger at every tenth token, x_9, x_19, ..."""
    return Setting(
        config=SfiConfig(slow_start=1, min_gap=0, span=0).replace(**{**RULES, **changes}),
        trigger_token_ids=frozenset({STOP}),
    )


def near(position: int, span: int) -> range:
    return range(position - span, position + span + 1)


def by_sets(trace: Trace, request: int, rules: Setting, slow: list[bool]) -> dict:
    """Recompute (lower, upper, overlap) by (step, layer, head), with sets and loops only."""
    config = rules.config
    at = {(r["step"], r["layer"], r["head"]): r for r in rows(trace, "supports", request=request)}
    values, last = {}, 0
    for step in range(len(slow)):
        last = step if slow[step] else last
        if slow[step]:
            continue
        for layer in range(2):
            for head in range(2):
                old, new = at[last, layer, head], at[step, layer, head]
                length = PROMPT + last
                start = max(config.sink, length - config.recent)
                allowed = set(range(config.sink, start))
                mass = dict(zip(old["positions"], old["mass"], strict=True))
                score = {
                    j: max((mass[i] for i in near(j, config.span) if i in mass and i in allowed), default=0.0)
                    for j in allowed
                }
                if config.page_size > 1:
                    size = config.page_size
                    pages = {j: [score[i] for i in allowed if i // size == j // size] for j in allowed}
                    score = {j: sum(page) / len(page) for j, page in pages.items()}
                ranked = sorted((j for j in allowed if score[j] > 0), key=lambda j: (-score[j], j))
                selected = allowed if len(allowed) <= config.budget else set(ranked[: config.budget])
                now = PROMPT + step
                begin = max(config.sink, now - config.recent) if config.recent_mode == "sliding" else start
                attended = set(range(config.sink)) | selected | set(range(begin, now))
                count = config.sink + min(config.budget, len(allowed)) + now - begin
                known = dict(zip(new["positions"], new["mass"], strict=True))
                lower = sum(m for j, m in known.items() if j in attended)
                unseen = count - len(attended & set(known))
                least = min(known.values()) if len(known) == TOP else 0.0
                upper = lower + min(1 - sum(known.values()), unseen * least)
                shared = set(old["positions"]) & set(new["positions"])
                overlap = len(shared) / min(len(old["positions"]), len(new["positions"]))
                values[step, layer, head] = lower, min(1, upper), overlap
    return values


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budget": 5},
        {"budget": 24, "recent": 1, "sink": 0},
        {"page_size": 5, "span": 2, "recent_mode": "sliding"},
        {"recent_mode": "sliding", "recent": 30},
        {"recent_mode": "sliding", "span": 3, "t_max": 6},
        {"recent": 190, "recent_mode": "sliding"},
        {"trigger_delay": 1, "min_gap": 12, "sink": 50},
        {"trigger_policy": "never"},
    ],
    ids=str,
)
def test_retained_mass_and_overlap_are_those_of_the_sets(trace, recorded, changes):
    rules, supports = setting(**changes), recorded[1]
    metrics = replay_request(supports, rules)
    slow = [bool(reason) for reason in schedule(supports, rules)]
    assert metrics.slow_N.tolist() == slow
    expected = by_sets(trace, supports.request, rules, slow)
    assert expected
    for (step, layer, head), values in expected.items():
        unit = layer * 2 + head
        computed = [getattr(metrics, n)[step, unit] for n in ("lower_NU", "upper_NU", "overlap_NU")]
        assert computed == pytest.approx(values, abs=2e-6)
    assert (metrics.lower_NU[slow] == 1).all()
    assert np.isnan(metrics.overlap_NU[slow]).all()


def test_an_outcome_sums_every_fast_step_layer_and_head(trace, recorded):
    rules = setting(t_max=4)
    outcome = replay(recorded, rules)
    fast_rows, read, slow = [], 0, 0
    for supports in recorded:
        flags = [bool(reason) for reason in schedule(supports, rules)]
        slow += sum(flags)
        values = by_sets(trace, supports.request, rules, flags)
        fast_rows += [(*value, supports.request, *place) for place, value in values.items()]
        last = 0
        for step in range(1, 60):
            last = step if flags[step] else last
            read += PROMPT + step if flags[step] else 4 + 20 + 16 + step - last
    lowest = min(fast_rows)
    assert outcome.slow_steps == slow
    assert outcome.fast_steps == 120 - slow
    assert outcome.slow_rate == pytest.approx((slow - 2) / 118)
    assert sum(outcome.reasons.values()) == slow
    assert outcome.reasons["first"] == 2
    assert outcome.retained_mass == pytest.approx(np.mean([row[0] for row in fast_rows]))
    assert outcome.retained_mass_upper == pytest.approx(np.mean([row[1] for row in fast_rows]))
    assert outcome.overlap_at_reuse == pytest.approx(np.mean([row[2] for row in fast_rows]))
    assert outcome.retained_mass_p5 == pytest.approx(np.percentile([row[0] for row in fast_rows], 5))
    worst = outcome.worst
    assert tuple(worst[name] for name in ("request", "step", "layer", "head")) == lowest[3:]
    assert worst["retained_mass"] == pytest.approx(lowest[0])
    assert outcome.attended_tokens == pytest.approx(read / 118)
    assert outcome.read_ratio == pytest.approx(read / (2 * sum(PROMPT + t for t in range(1, 60))))


def test_a_step_of_codescan_reads_the_best_of_its_own_support(trace, recorded):
    """Budget 6 of J = [4, start); all 184 candidates are read with a budget of 200, and nothing to choose."""
    metrics = replay_request(recorded[1], setting().under("codescan", budget=6))
    assert metrics.reasons == ["first"] + [""] * 59
    for row in rows(trace, "supports", request=1):
        if row["step"]:
            start = PROMPT + row["step"] - 16
            pairs = list(zip(row["positions"], row["mass"], strict=True))
            best = sorted((mass for at, mass in pairs if 4 <= at < start), reverse=True)[:6]
            expected = sum(best) + sum(mass for at, mass in pairs if at < 4 or at >= start)
            unit = 2 * row["layer"] + row["head"]
            assert metrics.lower_NU[row["step"], unit] == pytest.approx(expected, abs=1e-6)
            assert metrics.upper_NU[row["step"], unit] >= expected - 1e-6
    choosing = choosing_tokens(PROMPT + 5, MODEL["layers"][0]["key_width"]) + 1  # the pseudo token's value
    assert metrics.attended_N[5] == pytest.approx(4 + 6 + 16 + choosing)
    assert np.isnan(metrics.overlap_NU).all()
    wide = replay_request(replace(recorded[1], top=500), setting().under("codescan", budget=200))
    assert wide.attended_N[5] == PROMPT + 5


def test_layers_left_dense_read_everything_and_keep_everything(tmp_path, recorded):
    folder = make_trace(tmp_path / "t", policy="sfi", requests=2, seed=3, config={**CONFIG, "dense_layers": [1]})
    dense = Trace.open(folder)
    supports = Supports.load(dense)
    assert {int(layer) for of_request in supports for layer in of_request.layer_U} == {0}
    outcome = replay(supports, Setting.recorded(dense))
    plain = replay(recorded, setting())
    mean_context = PROMPT + 30
    assert outcome.attended_tokens == pytest.approx((plain.attended_tokens + mean_context) / 2)
    assert outcome.bytes_per_token > plain.bytes_per_token


def test_a_chosen_request_layer_and_head(trace):
    (supports,) = Supports.load(trace, 1, layers=[1], heads=[0])
    assert (supports.request, supports.layer_U.tolist(), supports.head_U.tolist()) == (1, [1], [0])
    expected = rows(trace, "supports", request=1, layer=1, head=0)
    assert supports.position_NUK[:, 0].tolist() == [row["positions"] for row in expected]
    assert supports.mass_NUK[7, 0].tolist() == pytest.approx(expected[7]["mass"])
    assert len(supports.tokens) == supports.steps == 60


def test_a_killed_run_counts_up_to_its_last_whole_step(tmp_path, recorded):
    folder = make_trace(tmp_path / "trace", requests=2, seed=3, finished=None)
    part = folder / "supports" / "part-00000.parquet"
    table = parquet.read_table(part)
    parquet.write_table(table.slice(0, len(table) - 4 * 10 - 1), part)  # request 1 ends within step 49
    first, second = Supports.load(Trace.open(folder))
    assert (first.steps, second.steps) == (60, 49)
    assert (second.position_NUK == recorded[1].position_NUK[:49]).all()
    assert len(second.tokens) == 49
    parquet.write_table(table.slice(0, 4 * 60 + 3), part)  # nothing whole of request 1
    (only,) = Supports.load(Trace.open(folder))
    assert only.request == 0
    parquet.write_table(table.slice(0, 4 * 30), part)  # nothing at all of request 1
    (only,) = Supports.load(Trace.open(folder))
    assert (only.request, only.steps) == (0, 30)


def test_a_run_is_compared_with_its_own_prediction(tmp_path):
    real = Trace.open(make_trace(tmp_path / "real", policy="sfi", requests=2, seed=5))
    comparison = compare(Supports.load(real), real, real)
    audited = [row for row in rows(real, "supports") if row["step"] % 10]
    steps = [row for row in rows(real, "steps") if row["step"]]
    assert comparison.same_schedule
    assert [request["steps"] for request in comparison.requests] == [60, 60]
    assert comparison.measured.retained_mass == pytest.approx(np.mean([r["retained_mass"] for r in audited]))
    overlap = np.mean([row["overlap_last_refresh"] for row in audited])
    assert comparison.measured.overlap_at_reuse == pytest.approx(overlap)
    assert comparison.predicted.overlap_at_reuse == pytest.approx(overlap)
    assert comparison.measured.attended_tokens == pytest.approx(np.mean([r["attended_tokens"] for r in steps]))
    assert comparison.predicted.attended_tokens == pytest.approx(comparison.measured.attended_tokens)
    assert comparison.predicted.bytes_per_token == comparison.measured.bytes_per_token
    assert comparison.mean_difference == pytest.approx(
        comparison.predicted.retained_mass - comparison.measured.retained_mass
    )
    assert comparison.mean_distance >= abs(comparison.mean_difference)


def test_another_run_is_compared_up_to_the_first_other_token(tmp_path):
    """The step whose token differs still saw the same tokens, so it counts."""
    full = Trace.open(make_trace(tmp_path / "full", seed=5))
    folder = make_trace(tmp_path / "real", policy="sfi", seed=6, audit=3)
    rewrite(folder, "steps", lambda steps: [row | {"token_id": 77} if row["step"] == 33 else row for row in steps])
    real = Trace.open(folder)
    comparison = compare(Supports.load(full), full, real)
    assert comparison.requests == [{"request": 0, "steps": 34, "recorded_steps": 60, "measured_steps": 60}]
    audited = [row for row in real.table("supports").to_pylist() if row["step"] % 10 and row["step"] < 34]
    assert len(audited) == 4 * 10  # every third step but 0 and 30
    assert comparison.measured.retained_mass == pytest.approx(np.mean([r["retained_mass"] for r in audited]))
    (supports,) = Supports.load(full)
    metrics = replay_request(supports, Setting.recorded(real))
    places = sorted({row["step"] for row in audited})
    assert comparison.predicted.retained_mass == pytest.approx(metrics.lower_NU[places].mean())
    assert comparison.same_schedule


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "full-kv"}, "must be of --policy sfi or codescan, got full-kv"),
        ({"model": {**MODEL, "query_heads": 8}}, "of one model, got another query_heads in"),
        ({"prompts": [{"request": 0, "tokens": 200, "sha256": "1" * 64}]}, "for request 0 in"),
        ({"redacted": True}, "is redacted; it can be compared with itself only"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(tmp_path, changes, message):
    full = Trace.open(make_trace(tmp_path / "full"))
    real = Trace.open(make_trace(tmp_path / "real", **{"policy": "sfi", **changes}))
    with pytest.raises(TraceError, match=message):
        compare(Supports.load(full), full, real)


def test_top_takes_the_lower_index_of_a_tie_and_no_zeros():
    score = np.array([[0.1, 0.5, 0.5, 0.0, 0.5], [0.0, 0.2, 0.0, 0.0, 0.0]], np.float32)
    assert top(score, 2).tolist() == [[False, True, True, False, False], [False, True, *[False] * 3]]
    assert top(score, 9).tolist() == (score > 0).tolist()


def test_the_front_holds_what_nothing_else_beats():
    points = [(1.0, 1.0), (2.0, 0.9), (2.0, 0.8), (3.0, 0.7), (2.5, 0.6), (2.0, 0.9), (4.0, 0.1), (1.5, 0.9)]
    outcomes = [outcome(speedup=speedup, retained_mass=mass) for speedup, mass in points]
    assert pareto(outcomes) == [True, True, False, True, False, True, True, False]
    assert pareto([]) == []


@pytest.fixture(scope="module")
def bundled_run(tmp_path_factory) -> Callable[[str], Trace]:
    """Run the bundled checkpoint under a policy, once; the audit records every position."""

    @cache
    def run(policy: str) -> Trace:
        model, tokenizer = load()
        with small_example():
            example = load_example()
        folder = tmp_path_factory.mktemp("bundled") / policy
        with ParquetObserver(folder, tokenizer=tokenizer, positions=True) as observer:
            sfi_core.generate(
                model, tokenizer, [example.prompt], example.config, policy=policy, max_new_tokens=40,
                observers=[observer], audit=AuditConfig(every=1, top=9000),
            )  # fmt: skip
        return Trace.open(folder)

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", first(["full-kv", "sfi"]))
def test_a_real_run_measures_what_was_predicted(bundled_run, source):
    """All positions are recorded, so that both bounds are one; the Selector picks almost the Top-K."""
    trace, real = bundled_run(source), bundled_run("sfi")
    comparison = compare(Supports.load(trace), trace, real)
    assert comparison.same_schedule
    assert (comparison.requests[0]["steps"], comparison.predicted.fast_steps) == (40, 36)
    assert comparison.predicted.retained_mass_upper - comparison.predicted.retained_mass < 1e-4
    assert abs(comparison.mean_difference) < 0.01
    assert comparison.mean_distance < 0.02
    assert comparison.predicted.attended_tokens == pytest.approx(comparison.measured.attended_tokens)
    # every position is in the recorded support of every step
    assert comparison.predicted.overlap_at_reuse == comparison.measured.overlap_at_reuse == 1


@pytest.mark.parametrize(
    "rules",
    first(
        [{"trigger_policy": "random", "random_rate": 0.3, "trigger_seed": 5}, {"trigger_policy": "stride", "stride": 7}]
    ),
)
def test_a_run_is_slow_where_its_replay_says(tmp_path, rules):
    """Both ask one rule, which counts the steps or draws by prompt and step."""
    model, tokenizer = load()
    with ParquetObserver(tmp_path / "run", tokenizer=tokenizer) as observer:
        sfi_core.generate(
            model, tokenizer, [load_example().prompt[-2000:]], load_example().config.replace(**rules),
            max_new_tokens=25, stop_token_ids=[], observers=[observer], audit=AuditConfig(every=1),
        )  # fmt: skip
    trace = Trace.open(tmp_path / "run")
    comparison = compare(Supports.load(trace), trace, trace)
    assert comparison.same_schedule
    assert 1 < comparison.measured.reasons[rules["trigger_policy"]] < 22


def test_recorded_tokens_give_the_triggers_that_the_tokenizer_gave(bundled_run):
    trace = bundled_run("full-kv")
    (supports,) = Supports.load(trace)
    trigger_ids = RecordedVocabulary.of([trace]).trigger_ids(trace.manifest["config"]["triggers"])
    assert trigger_ids == set(trace.manifest["trigger_token_ids"]) & set(supports.tokens)
    assert trigger_ids
