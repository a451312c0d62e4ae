"""Tuned settings run for real on the bundled checkpoint: what was predicted, and what was measured."""

from dataclasses import replace

import pytest

import sfi_core
from sfi_core.bundled.example import load_example
from sfi_core.errors import TraceError
from sfi_core.models.load import load
from sfi_core.settings.engine import AuditConfig
from sfi_traces.figures import new_figure
from sfi_traces.model.trace import Trace
from sfi_traces.record.parquet import ParquetObserver
from sfi_traces.replay import Comparison, Setting, Supports, replay
from sfi_traces.tune.confirm import Confirmer, Material, check_model
from sfi_traces.tune.result import Confirmation, TuneResult, _draw_runs
from sfi_traces.tune.tuning import Candidate, Limits, Tuning
from tests.small_example import small_example
from tests.traces.made import make_trace
from tests.traces.small import outcome

SETTINGS = ({"budget": 64}, {}, {"budget": 600, "trigger_policy": "stride", "stride": 8})


@pytest.fixture(scope="module")
def loaded():
    with small_example():
        yield load()


@pytest.fixture(scope="module")
def trace(tmp_path_factory, loaded) -> Trace:
    model, tokenizer = loaded
    folder = tmp_path_factory.mktemp("bundled") / "dense"
    example = load_example()
    with ParquetObserver(folder, tokenizer=tokenizer) as observer:
        sfi_core.generate(
            model, tokenizer, [example.prompt], example.config, policy="full-kv", observers=[observer],
            audit=AuditConfig(every=1), max_new_tokens=60,
        )  # fmt: skip
    return Trace.open(folder)


@pytest.fixture(scope="module")
def recorded(trace) -> list[Supports]:
    return Supports.load(trace)


@pytest.fixture(scope="module")
def confirmed(loaded, trace, recorded):
    model, tokenizer = loaded
    material = Material.of_trace(trace, recorded, tokenizer)
    base = Setting.recorded(trace)
    told: list[tuple[int, int]] = []
    confirmer = Confirmer(model=model, tokenizer=tokenizer, material=[material])
    configs = [base.config.replace(**changes) for changes in SETTINGS]
    rows, speed = confirmer(configs, ["sfi"] * 3, lambda *counts: told.append(counts))
    return rows, speed, told


def test_a_prediction_is_close_to_what_the_run_measures(confirmed):
    rows, speed, told = confirmed
    for row in rows[:2]:
        assert row.comparison.requests[0].steps == 50
        assert abs(row.error) < 0.05
        assert row.comparison.same_schedule
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert speed > 0


def test_a_prediction_is_the_replay_s(confirmed, trace, recorded):
    rows, _, _ = confirmed
    base = Setting.recorded(trace)
    for row, changes in list(zip(rows, SETTINGS, strict=True))[:2]:
        own = replay(recorded, replace(base, config=base.config.replace(**changes)))
        assert row.comparison.predicted == own
        assert row.error == own.retained_mass - row.comparison.measured.retained_mass


def test_right_and_wrong_answers_are_told_apart(confirmed):
    """A stride of 8 loses the thread, whatever its budget (docs/tune.md)."""
    rows, _, _ = confirmed
    assert [row.exact_match for row in rows] == [True, True, False]
    assert rows[2].comparison.requests[0].steps < 50
    for row in rows[:2]:
        assert 0 <= row.kl_next_token < 0.05
        assert row.argmax_agreement == 1.0
        assert row.decode_tokens_per_second > 0
    assert rows[2].kl_next_token > 0.05
    assert rows[2].argmax_agreement < 1


def test_a_model_that_the_trace_is_not_of_is_refused(loaded, tmp_path, trace):
    check_model(*loaded, trace)
    other = Trace.open(make_trace(tmp_path / "t"))
    with pytest.raises(TraceError, match="got name made-up there and bundled here"):
        check_model(*loaded, other)
    layers = {**trace.manifest["model"], "layers": []}
    with pytest.raises(TraceError, match="must be of the model that --model names, got other layers"):
        check_model(*loaded, Trace(trace.path, {**trace.manifest, "model": layers}))


def row_of(predicted: float, upper: float, measured: float, *, exact: bool | None = True) -> Confirmation:
    comparison = Comparison(
        predicted=outcome(retained_mass=predicted, retained_mass_upper=upper),
        measured=outcome(retained_mass=measured, retained_mass_upper=measured),
        same_schedule=True, mean_difference=0.0, mean_distance=0.0, requests=[],
    )  # fmt: skip
    return Confirmation(
        comparison=comparison, kl_next_token=0.0, argmax_agreement=1.0, decode_tokens_per_second=1.0, exact_match=exact
    )


@pytest.fixture
def found(trace) -> TuneResult:
    """A front of budgets, the middle one chosen."""
    tuning = Tuning.of([trace], axes={}, trigger_sets={}, limits=Limits())
    base, front = tuning.space.base, []
    for budget in (64, 256, 1000):
        setting = replace(base, config=base.config.replace(budget=budget))
        front.append(Candidate(setting=setting, outcome=tuning.outcome(setting)))
    return TuneResult(tuning=tuning, study=None, front=front, chosen=1, rule="the knee")


def rows_for(*exact: bool | None):
    return lambda configs, _: ([row_of(0.5, 0.6, 0.5, exact=answer) for answer in exact[: len(configs)]], 9.0)


def test_a_choice_that_runs_well_stays(found):
    after = found.confirm(rows_for(True, True, True), 3)
    assert (after.chosen, after.rule, list(after.confirmed)) == (1, "the knee", [0, 1, 2])
    assert found.confirm(rows_for(None), 1).chosen == 1
    assert list(found.confirm(rows_for(None), 1).confirmed) == [1]


def test_a_choice_that_answers_wrong_gives_way_to_one_that_held(found):
    after = found.confirm(rows_for(False, False, True), 3)
    assert after.chosen == 2
    assert after.rule.endswith("of the confirmed settings that held when they ran")
    assert found.confirm(rows_for(False, False, False), 3).rule.endswith("nor did another that was run")


def test_a_choice_that_misses_a_limit_when_it_runs_gives_way(found):
    limits = Limits(min_retained=0.55)
    strict = replace(found, tuning=replace(found.tuning, limits=limits))

    def run(configs, _):
        return [row_of(0.6, 0.6, kept) for kept in (0.56, 0.54, 0.6)], 9.0

    after = strict.confirm(run, 3)
    assert after.chosen == 0  # the cheapest of the two that keep it


def test_a_run_that_gave_another_answer_is_drawn_where_it_was_predicted():
    axes = new_figure(3, 3).subplots()
    front = [{"bytes_per_token": 1e6 * place, "retained_mass": place / 10} for place in (1, 2, 3)]
    measured = {"bytes_per_token": 2.5e6, "retained_mass": 0.25}
    runs = [(0, False, 11), (1, None, 50), (2, True, 11)]
    confirmed = [
        {"place": place, "exact_match": match, "steps": steps, "recorded_steps": 50, "measured": measured}
        for place, match, steps in runs
    ]
    _draw_runs(axes, {"front": front, "confirmed": confirmed})
    drawn = {one.get_label(): one.get_offsets().tolist() for one in axes.collections}
    assert drawn == {
        "WRONG answer when it ran": [[1.0, 0.1]], "measured": [[2.5, 0.25]], "other tokens when it ran": [[3.0, 0.3]],
    }  # fmt: skip
