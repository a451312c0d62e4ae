"""The numbers behind the figures, recomputed in plain Python; set measures; intervals by hand."""

import random
import statistics

import numpy as np
import pyarrow as pa
import pytest

from sfi_core.errors import TraceError
from sfi_traces import Trace
from sfi_traces import overlap as overlaps
from sfi_traces.model.request import Request
from sfi_traces.overlap import Overlap
from sfi_traces.results import paired_difference, wilson
from sfi_traces.summary.supports import selection_facts
from sfi_traces.views import captions, figure_data
from sfi_traces.views.figure_data import REST, lag_lines, lambda_over_time, retained_mass, step_phases
from tests.traces.made import make_trace
from tests.traces.small import rewrite


def rows(view: Request, table: str) -> list[dict]:
    return [row for row in view.trace.table(table).to_pylist() if row["request"] == view.index]


def supports(view: Request) -> dict[tuple[int, int, int], dict]:
    return {(row["layer"], row["head"], row["step"]): row for row in rows(view, "supports")}


@pytest.fixture
def full(tmp_path) -> Request:
    return Request(Trace.open(make_trace(tmp_path / "full", steps=45, requests=2)), index=1)


@pytest.fixture
def sfi(tmp_path) -> Request:
    return Request(Trace.open(make_trace(tmp_path / "sfi", steps=45, policy="sfi")))


@pytest.mark.parametrize("block", [1, 4, 64])
def test_intersections_equal_those_of_python_sets(monkeypatch, block):
    """Sets of different sizes, one of them empty, in several blocks, the last one smaller, or in one."""
    monkeypatch.setattr(overlaps, "BLOCK", block)
    rng = np.random.default_rng(0)
    sets = [np.sort(rng.choice(60, size, replace=False)) for size in (5, 40, 1, 0, 60, 17)]
    expected = [[len({*positions} & {*other}) for other in sets] for positions in sets]
    assert overlaps.intersections(overlaps.padded(pa.array(sets))).tolist() == expected
    assert overlaps.intersections(np.full((2, 1), -1)).tolist() == [[0, 0], [0, 0]]


def test_lags_sort_the_pairs_by_distance_and_by_whether_a_boundary_lies_between(tmp_path):
    """With steps that were not audited, so that neighbors in the matrix are not one step apart."""
    view = Request(Trace.open(make_trace(tmp_path / "t", steps=50, policy="sfi", audit=4)))
    sentence = {row["step"]: row["sentence"] for row in rows(view, "steps")}
    step, matrix = view.supports.step_N.tolist(), view.supports.overlap
    assert step != list(range(0, 50, 4))
    assert len(step) < 50
    pairs: dict[tuple[bool, int], list[float]] = {}
    for i, first in enumerate(step):
        for j, second in enumerate(step[i + 1 :], i + 1):
            key = (sentence[first] == sentence[second], second - first)
            pairs.setdefault(key, []).append(float(matrix[i, j]))
    for line, same in zip(lag_lines(view), (True, False), strict=True):
        expected = {lag: values for (kind, lag), values in pairs.items() if kind is same}
        assert line.lag.tolist() == sorted(expected)
        for at, lag in enumerate(line.lag.tolist()):
            values = expected[lag]
            assert line.pairs[at] == len(values)
            assert line.mean[at] == pytest.approx(statistics.mean(values))
            assert line.low[at] == pytest.approx(np.quantile(values, 0.1))
            assert line.high[at] == pytest.approx(np.quantile(values, 0.9))
        flat = [value for values in expected.values() for value in values]
        assert line.overall == pytest.approx(statistics.mean(flat))


def test_lags_of_a_long_run_are_counted_stretch_by_stretch(full, monkeypatch):
    whole = lag_lines(full, most=6)
    assert max(line.lag.max() for line in whole) == 6
    monkeypatch.setattr(figure_data, "MOST_STEPS", 10)
    for expected, line in zip(whole, lag_lines(full, most=6), strict=True):
        assert line.pairs.tolist() == expected.pairs.tolist()
        assert line.mean.tolist() == pytest.approx(expected.mean.tolist(), rel=1e-6)
        assert line.high.tolist() == pytest.approx(expected.high.tolist(), rel=1e-6)


def test_retained_mass_is_the_mean_over_fast_steps(sfi):
    slow = {row["step"] for row in rows(sfi, "steps") if row["slow"]}
    mass, steps = retained_mass(sfi)
    assert sorted(mass) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert steps == 45 - len(slow)
    means = {}
    for layer in (0, 1):
        for head in (0, 1):
            values = [r["retained_mass"] for key, r in supports(sfi).items()
                      if key[:2] == (layer, head) and key[2] not in slow]  # fmt: skip
            means[layer, head] = statistics.mean(values)
            assert mass[layer, head] == pytest.approx(means[layer, head])
    least, most = (f"layer {p[0]}, KV head {p[1]}" for p in (min(means, key=means.get), max(means, key=means.get)))
    assert captions.retained(mass, steps).note.endswith(f"Least in {least}; most in {most}.")


def test_without_a_fast_step_there_is_none(full):
    with pytest.raises(TraceError, match="has no audited fast step"):
        retained_mass(full)


def test_lambda_is_the_distribution_over_layers_and_heads_at_each_refresh(sfi):
    data = lambda_over_time(sfi)
    by_step: dict[int, list[float]] = {}
    for row in rows(sfi, "selections"):
        by_step.setdefault(row["step"], []).append(row["lambda_star"])
    assert data.step.tolist() == sorted(by_step) == [0, 10, 20, 30, 40]
    assert data.median.tolist() == pytest.approx([statistics.median(by_step[s]) for s in data.step])
    assert data.low.tolist() == pytest.approx([np.quantile(by_step[s], 0.1) for s in data.step])
    assert data.high.tolist() == pytest.approx([np.quantile(by_step[s], 0.9) for s in data.step])
    values = [value for each in by_step.values() for value in each]
    clipped = [value for value in values if abs(value - 0.02) < 1e-6]
    assert 0 < len(clipped) < len(values)
    assert (data.clip, data.clipped) == (0.02, len(clipped) / len(values))


def test_the_figure_and_the_summary_count_the_same_values_at_the_clip(sfi):
    """A value 5e-5 below the clip does not stand there; both are on one report."""

    def near(every):
        values = [0.02, 0.02 * (1 - 5e-5), 0.01]
        return [row | {"lambda_star": values[at % 3]} for at, row in enumerate(every)]

    rewrite(sfi.trace.path, "selections", near)
    counted = selection_facts(Request.of(sfi.trace))["clipped_share"]
    assert lambda_over_time(sfi).clipped == counted == pytest.approx(7 / 20)


def test_phases_of_a_step_add_up_to_its_wall_time(sfi):
    data = step_phases(sfi)
    steps = {row["step"]: row for row in rows(sfi, "steps")}
    assert data.step.tolist() == list(range(1, 45))  # the prefill has a scale of its own
    assert data.prefill_us == steps[0]["elapsed_us"]
    assert data.slow.tolist() == [10, 20, 30, 40]
    assert list(data.phases) == ["attention.fast", "attention.dense", "selector", "top_k", "pack", "sample", REST]
    for at, step in enumerate(data.step.tolist()):
        spans = [r for r in rows(sfi, "timings") if r["step"] == step and r["name"] != "forward"]
        for name in set(data.phases) - {REST}:
            expected = sum(span["elapsed_us"] for span in spans if span["name"] == name)
            assert data.phases[name][at] == pytest.approx(expected)
        total = sum(float(spent[at]) for spent in data.phases.values())
        assert total == pytest.approx(steps[step]["elapsed_us"])
    assert data.audit_us == 0


def test_the_audits_time_is_in_no_phase(sfi):
    before, other = step_phases(sfi), {"sample": {"name": "shadow"}}
    rewrite(sfi.trace.path, "timings", lambda timings: [row | other.get(row["name"], {}) for row in timings])
    data = step_phases(sfi)
    assert "sample" not in data.phases
    assert data.audit_us == pytest.approx(before.phases["sample"].mean())
    assert data.phases[REST].tolist() == pytest.approx(before.phases[REST].tolist())


def test_what_a_killed_run_wrote_beyond_its_last_step_is_left_out(sfi):
    rewrite(sfi.trace.path, "steps", lambda steps: [row for row in steps if row["step"] < 25])
    view = Request(sfi.trace)
    assert view.supports.step_N.tolist() == list(range(25))
    assert step_phases(view).step.tolist() == list(range(1, 25))
    assert retained_mass(view)[1] == 22


def test_a_step_that_lacks_a_support_somewhere_is_left_out(sfi):
    place = {"step": 7, "layer": 1, "head": 1}
    rewrite(sfi.trace.path, "supports", lambda table: [row for row in table if row | place != row])
    assert Request(sfi.trace).supports.step_N.tolist() == [*range(7), *range(8, 45)]
    assert 7 in Request(sfi.trace, layer=0).supports.step_N


@pytest.mark.parametrize(
    ("wanted", "option"), [({"head": 1}, "--audit 1"), ({"layer": 1}, "--audit 1 --set audit.layers=1")]
)
def test_supports_that_are_missing_name_an_option_that_exists(sfi, wanted, option):
    rewrite(sfi.trace.path, "supports", lambda table: [row for row in table if row["layer"] == row["head"] == 0])
    with pytest.raises(TraceError, match=f"; record it with {option}$"):
        assert Request(sfi.trace, 0, **wanted).supports


def padded_rows(rng: random.Random, shape: tuple[int, ...], width: int) -> tuple[np.ndarray, list[set]]:
    index, sets = np.full((*shape, width), -1, np.int32), []
    for place in np.ndindex(shape):
        chosen = sorted(rng.sample(range(40), rng.randint(0, width)))
        index[place][: len(chosen)] = chosen
        sets.append(set(chosen))
    return index, sets


@pytest.mark.parametrize(("first_width", "second_width"), [(8, 8), (3, 20), (20, 1), (0, 4), (5, 0)])
def test_counts_are_those_of_python_sets(first_width, second_width):
    rng = random.Random(first_width)
    first, firsts = padded_rows(rng, (4, 50), first_width)
    second, seconds = padded_rows(rng, (4, 50), second_width)
    counts = Overlap.of(first, second)
    pairs = list(zip(firsts, seconds, strict=True))
    assert counts.both.shape == (4, 50)
    assert counts.both.ravel().tolist() == [len(a & b) for a, b in pairs]
    assert counts.first.ravel().tolist() == [len(a) for a in firsts]
    assert counts.second.ravel().tolist() == [len(b) for b in seconds]
    smaller = [min(len(a), len(b)) for a, b in pairs]
    expected = [len(a & b) / n if n else np.nan for (a, b), n in zip(pairs, smaller, strict=True)]
    np.testing.assert_allclose(counts.coefficient.ravel(), expected, rtol=1e-6)
    union = [len(a & b) / len(a | b) if a | b else np.nan for a, b in pairs]
    np.testing.assert_allclose(counts.jaccard.ravel(), union, rtol=1e-6)


SKEWED = [0.0] * 12 + [0.1, 0.2, 0.4, 1.0]


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 2, 0.0945, 0.9055)],
)
def test_wilson_interval_is_the_published_one(right, n, low, high):
    interval = wilson([1.0] * right + [0.0] * (n - right))
    assert interval.mean == right / n
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_paired_difference_cancels_what_is_hard_for_both():
    hard = [0.0, 1.0] * 10
    difference = paired_difference(hard, hard)
    assert difference == (0.0, 0.0, 0.0)


def test_paired_interval_of_two_samples_is_their_range():
    """Of the four equally likely resamples one is all of either, so 2.5 % lies within it."""
    difference = paired_difference([1.0, 0.5], [0.0, 0.5])
    assert (difference.mean, difference.low, difference.high) == (0.5, 0.0, 1.0)


def test_paired_difference_refuses_what_is_not_paired():
    with pytest.raises(ValueError, match="scores must come in pairs, got 2 and 1"):
        paired_difference([1.0, 0.0], [1.0])


def test_the_paired_interval_is_the_percentiles_of_resamples():
    interval = paired_difference(SKEWED, [0.0] * len(SKEWED))
    drawn = np.random.default_rng(1).integers(len(SKEWED), size=(100_000, len(SKEWED)))
    ends = np.quantile(np.array(SKEWED)[drawn].mean(1), (0.025, 0.975))
    assert [interval.low, interval.high] == pytest.approx(ends, abs=0.01)
