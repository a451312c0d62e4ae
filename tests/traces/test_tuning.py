"""What a tuning may try, asks for and finds best; and its settings run for real on the bundled checkpoint."""

import tomllib
from dataclasses import asdict, replace

import pytest
from optuna.trial import FixedTrial

import sfi_core
from sfi_cli.commands.tune import tune_text
from sfi_cli.settings import SEARCHED
from sfi_cli.terminal.tables import rendered
from sfi_core import AuditConfig, SfiConfig, load
from sfi_core.bundled.example import load_example
from sfi_core.errors import ConfigError, SfiError, TraceError
from sfi_traces import ParquetObserver, Trace
from sfi_traces.figures import new_figure
from sfi_traces.replay import Comparison, Setting, Supports, replay
from sfi_traces.tune import tuning as searched
from sfi_traces.tune.confirm import Confirmer, Material, check_model
from sfi_traces.tune.result import Confirmation, TuneResult, _draw_runs, find, tuned_config, tuned_toml
from sfi_traces.tune.space import POLICY, Axis, NamedSet, Space, trigger_sets_of
from sfi_traces.tune.tuning import RULES, Candidate, Limits, Tuning, choose, costs, even_places
from tests.small_example import small_example
from tests.traces.made import CONFIG, STOP, make_trace
from tests.traces.small import fixed_trace, outcome

trace = fixed_trace(requests=2, seed=3)


@pytest.fixture(scope="module")
def recorded(trace) -> list[Supports]:
    return Supports.load(trace)


@pytest.fixture(scope="module")
def base(trace) -> Setting:
    return Setting.recorded(trace)


OWN = NamedSet(name="recorded", token_ids=frozenset({STOP}), strings=(".",))


def space(base, recorded, *sets, **given) -> Space:
    return Space.of(base, recorded, [OWN, *sets], given)


def test_the_command_line_s_copy_of_the_dimensions_is_the_tuner_s(base, recorded):
    """Its own names come with torch, which `--help` must not wait for."""
    assert tuple(space(base, recorded).axes) == (POLICY, "triggers", *SEARCHED)


@pytest.mark.parametrize(
    ("name", "text", "values", "is_range"),
    [
        ("t_max", "8,16, 32,8", (8, 16, 32), False),
        ("t_max", "8:64", (8, 64), True),
        ("t_max", "8:8", (8,), False),
        ("budget", "20", (20,), False),
        ("random_rate", "0.5:0.9", (0.5, 0.9), True),
        ("trigger_policy", "boundary, never", ("boundary", "never"), False),
    ],
)
def test_values_and_ranges_are_read(name, text, values, is_range):
    axis = Axis.parse(name, text)
    assert (axis.values, axis.is_range) == (values, is_range)
    assert all(axis.has(value) for value in values)
    assert not axis.has(1000) or name == "trigger_policy"


@pytest.mark.parametrize("text", ["x", "8:", ":8", "8:x", "1:2:3", "", ",", "64:8", "0.5"])
def test_what_is_no_value_or_range_is_refused(text):
    with pytest.raises(ConfigError, match=r"^t_max must be"):
        Axis.parse("t_max", text)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"budget": "0,8"}, ConfigError, "budget must be positive, got 0"),
        ({"budget": "8:25"}, TraceError, "record with --set audit.top=25"),
        ({"trigger_policy": "often"}, ConfigError, "unknown trigger-policy 'often'; expected one of"),
        ({"trigger_policy": "never", "t_max": "3,4"}, ConfigError, "t_max must come with"),
        (
            {"trigger_policy": "never", "budget": "20", "recent": "16", "span": "0", "slow_start": "1"},
            ConfigError,
            "search space must have more than one setting",
        ),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(base, recorded, given, kind, message):
    with pytest.raises(kind, match=message):
        space(base, recorded, **given)


VALUES = {"triggers": "other", "t_max": 8, "stride": 4, "budget": 5, "slow_start": 1}
VALUES |= dict.fromkeys(("trigger_delay", "min_gap", "span"), 0)


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        ("boundary", {"triggers", "t_max", "trigger_delay", "min_gap", "slow_start", "budget", "span"}),
        ("stride", {"stride", "slow_start", "budget", "span"}),
        ("never", {"slow_start", "budget", "span"}),
    ],
)
def test_a_trial_is_asked_for_what_its_trigger_policy_looks_at(base, recorded, policy, asked):
    """What the policy ignores would only give one counterfactual many names."""
    other = NamedSet(name="other", token_ids=frozenset({1}), strings=("the",))
    trial = FixedTrial(VALUES)
    chosen = space(base, recorded, other, trigger_policy=policy, recent="16").setting(trial)
    assert set(trial.params) == asked
    assert chosen.policy == policy


def test_the_trace_s_own_setting_is_a_first_trial_where_it_may_be_tried(base, recorded):
    within = space(base, recorded, recent="8,16", span="0:4", trigger_delay="0,1")
    values = within.base_values()
    assert within.setting(FixedTrial(values)).key == base.key
    assert space(base, recorded, recent="8").base_values() is None


def test_trigger_sets_that_no_token_tells_apart_are_one(trace, base):
    """Of punctuation, only full stops were generated."""

    def names(given, generated) -> list[str]:
        return [named.name for named in trigger_sets_of(base, [trace], given, set(generated))]

    assert names({}, {STOP, 1, 2}) == ["recorded"]
    assert names({"stops": ["."], "words": ["cat", "dog"], "dots": ["."], "none": ["#"]}, range(91)) == [
        "stops",
        "words",
    ]


def test_an_outcome_is_replayed_once(base, recorded, monkeypatch):
    calls, whole = [], searched.replay
    monkeypatch.setattr(searched, "replay", lambda *given: calls.append(given) or whole(*given))
    tuned = Tuning(traces=[], recorded=[recorded], space=space(base, recorded), limits=Limits())
    named = Setting(config=base.config, trigger_token_ids=base.trigger_token_ids, triggers="other")
    assert tuned.outcome(base) == tuned.outcome(named)
    assert len(calls) == 1


def candidates(*points) -> list[Candidate]:
    return [
        Candidate(setting=None, outcome=outcome(bytes_per_token=x, retained_mass=y, read_ratio=x / 10))
        for x, y in points
    ]


def test_the_choice_follows_its_rule():
    front = candidates((1, 0.1), (2, 0.7), (5, 0.8), (9, 0.9))
    assert choose(front, Limits()) == (1, RULES["knee"])
    assert choose(front, Limits(min_retained=0.05)) == (0, RULES["min-retained"])
    assert choose(front, Limits(max_read=0.9)) == (3, RULES["max-read"])
    assert choose(front, Limits(min_retained=0.05, max_read=0.9))[0] == 0
    assert choose(front[2:3], Limits())[0] == 0


def test_limits_say_by_how_much_they_are_missed():
    limits = Limits(min_retained=0.9, max_read=0.2)
    violations = limits.violations(outcome(retained_mass=0.8, read_ratio=0.1))
    assert violations == pytest.approx({"min-retained": 0.1, "max-read": -0.1})
    assert not limits.kept_by(outcome(retained_mass=0.8, read_ratio=0.1))
    assert limits.kept_by(outcome(retained_mass=0.9, read_ratio=0.2))
    assert Limits().kept_by(outcome(retained_mass=0.0, read_ratio=1.0))


@pytest.mark.parametrize(
    ("count", "wanted", "included", "places"),
    [(10, 3, 4, [0, 4, 9]), (10, 3, 1, [1, 4, 9]), (2, 5, 1, [0, 1]), (10, 1, 7, [7]), (10, 0, 7, [])],
)
def test_what_is_confirmed_is_spread_over_the_front(count, wanted, included, places):
    assert even_places(count, wanted, included) == places


def test_a_tuned_file_gives_its_settings_back(tmp_path, base):
    config = SfiConfig().replace(trigger_token_ids=[3, 7], budget=77, random_rate=0.25, selector={"alpha": 0.25})
    provenance = {
        "texts": ['a"b', "\n", "\x7f"], "nothing": None, "nan": float("nan"), "empty": [],
        "predicted": {"retained": 0.5, "worst": None}, "confirmed": [{"x": 1, "deep": {"y": 2}}, {"x": 2}],
    }  # fmt: skip
    path = tmp_path / "tuned.toml"
    path.write_text(tuned_toml(config, ["budget", "t_max"], provenance))
    assert SfiConfig().merge_toml(path).to_dict() == config.to_dict()
    lines = path.read_text().splitlines()
    assert {"budget = 77", "t_max = 64", "alpha = 0.25", "# recent = 256", "# eta = 0.4"} <= set(lines)
    written = tomllib.loads(path.read_text())["provenance"]
    assert written == {
        "texts": ['a"b', "\n", "\x7f"], "empty": [],
        "predicted": {"retained": 0.5}, "confirmed": [{"x": 1, "deep": {"y": 2}}, {"x": 2}],
    }  # fmt: skip


def test_sets_are_written_as_a_run_needs_them(base):
    boundary = Setting(config=base.config, trigger_token_ids=frozenset({7, 3}), triggers="x")
    strings = NamedSet(name="x", token_ids=frozenset({3}), strings=(".", "!"))
    mined = NamedSet(name="x", token_ids=frozenset({7, 3}))
    assert tuned_config(boundary, strings).triggers == (".", "!")
    assert tuned_config(boundary, strings).trigger_token_ids is None
    assert tuned_config(boundary, mined).trigger_token_ids == (3, 7)
    never = Setting(config=base.config.replace(trigger_policy="never"), trigger_token_ids=frozenset({3}))
    assert asdict(tuned_config(never, mined)) == asdict(never.config)


def tuning(*traces: Trace, limits: Limits | None = None, **axes) -> Tuning:
    return Tuning.of(traces, axes=axes, trigger_sets={}, limits=limits or Limits())


def test_a_search_begins_with_the_trace_s_own_setting_and_tells_of_each_trial(trace):
    trials: list[int] = []
    tuned = tuning(trace, recent="16,20")
    result = find(tuned, 12, on_trial=trials.append)
    assert trials == list(range(1, 13))
    outcome = tuned.outcome(tuned.space.base)
    assert result.document()["points"][0] == [outcome.bytes_per_token, outcome.retained_mass]


def test_ctrl_c_leaves_the_trials_before_it(trace):
    def interrupted(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    result = find(tuning(trace), 10, on_trial=interrupted)
    assert (result.interrupted, result.document()["trials"]) == (True, 2)


def test_nothing_tried_beats_the_front(trace):
    tuned = tuning(trace)
    result = find(tuned, 40)
    data = result.document()
    assert len(data["points"]) == data["trials"] == 40
    front = [costs(candidate.outcome) for candidate in result.front]
    assert front == sorted(front)
    tried = [(bytes_, -mass) for bytes_, mass in data["points"]]
    for cost, loss in front:
        assert not any(other[0] <= cost and other[1] <= loss and other != (cost, loss) for other in tried)
    for point in tried:
        assert any(cost <= point[0] and loss <= point[1] for cost, loss in front)
    assert [row["chosen"] for row in data["front"]].index(True) == result.chosen


def test_a_seed_tries_the_same_settings(trace):
    tuned = tuning(trace)
    points = [find(tuned, 15, seed=seed).document()["points"] for seed in (1, 1, 2)]
    assert points[0] == points[1] != points[2]


def test_every_setting_of_the_front_keeps_the_limits(trace):
    limits = Limits(min_retained=0.25, max_read=0.6)
    result = find(tuning(trace, limits=limits), 40)
    assert all(limits.kept_by(candidate.outcome) for candidate in result.front)
    assert result.chosen == 0  # the cheapest
    masses = [point[1] for point in result.document()["points"]]
    assert min(masses) < 0.25


def test_limits_that_nothing_keeps_say_how_close_it_came(trace):
    tuned = tuning(trace, limits=Limits(min_retained=0.99, max_read=0.3), trigger_policy="boundary")
    with pytest.raises(SfiError, match=r"keep at least 0\.99 and read at most 0\.3, got none in 20"):
        find(tuned, 20)


def test_a_budget_beyond_the_audit_s_is_cut_to_it_and_the_table_says_so(tmp_path):
    """The default budget is larger than what an audit records by default."""
    wide = Trace.open(make_trace(tmp_path / "b", config=CONFIG | {"budget": 2048}))
    top = wide.manifest["audit"]["top"]
    tuned = tuning(wide)
    assert tuned.space.base.config.budget == top
    result = find(tuned, 5)
    assert f"but for its budget of 2,048: the audit recorded {top}; >" in rendered(tune_text(result.document()))


SETTINGS = ({"budget": 64}, {}, {"budget": 600, "trigger_policy": "stride", "stride": 8})


@pytest.fixture(scope="module")
def loaded():
    with small_example():
        yield load()


@pytest.fixture(scope="module")
def bundled(tmp_path_factory, loaded) -> Trace:
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
def bundled_supports(bundled) -> list[Supports]:
    return Supports.load(bundled)


@pytest.fixture(scope="module")
def confirmed(loaded, bundled, bundled_supports):
    model, tokenizer = loaded
    material = Material.of_trace(bundled, bundled_supports, tokenizer)
    base = Setting.recorded(bundled)
    progress: list[tuple[int, int]] = []
    confirmer = Confirmer(model=model, tokenizer=tokenizer, material=[material])
    configs = [base.config.replace(**changes) for changes in SETTINGS]
    rows, speed = confirmer(configs, ["sfi"] * 3, lambda *counts: progress.append(counts))
    return rows, speed, progress


@pytest.mark.exhaustive
def test_a_prediction_is_close_to_what_the_run_measures(confirmed):
    rows, speed, progress = confirmed
    for row in rows[:2]:
        assert row.comparison.requests[0]["steps"] == 50
        assert abs(row.error) < 0.05
        assert row.comparison.same_schedule
    assert progress == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert speed > 0


def test_a_prediction_is_the_replay_s(confirmed, bundled, bundled_supports):
    rows, _, _ = confirmed
    base = Setting.recorded(bundled)
    for row, changes in list(zip(rows, SETTINGS, strict=True))[:2]:
        prediction = replay(bundled_supports, replace(base, config=base.config.replace(**changes)))
        assert row.comparison.predicted == prediction
        assert row.error == prediction.retained_mass - row.comparison.measured.retained_mass


def test_right_and_wrong_answers_are_told_apart(confirmed):
    """A stride of 8 loses the thread, whatever its budget (docs/tune.md)."""
    rows, _, _ = confirmed
    assert [row.exact_match for row in rows] == [True, True, False]
    assert rows[2].comparison.requests[0]["steps"] < 50
    for row in rows[:2]:
        assert 0 <= row.kl_next_token < 0.05
        assert row.argmax_agreement == 1.0
        assert row.decode_tokens_per_second > 0
    assert rows[2].kl_next_token > 0.05
    assert rows[2].argmax_agreement < 1


def test_a_model_that_the_trace_is_not_of_is_refused(loaded, tmp_path, bundled):
    check_model(*loaded, bundled)
    other = Trace.open(make_trace(tmp_path / "t"))
    with pytest.raises(TraceError, match="got name made-up there and bundled here"):
        check_model(*loaded, other)
    layers = {**bundled.manifest["model"], "layers": []}
    with pytest.raises(TraceError, match="must be of the model that --model names, got other layers"):
        check_model(*loaded, Trace(bundled.path, {**bundled.manifest, "model": layers}))


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
def found(bundled) -> TuneResult:
    tuning = Tuning.of([bundled], axes={}, trigger_sets={}, limits=Limits())
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
        return [row_of(0.6, 0.6, mass) for mass in (0.56, 0.54, 0.6)], 9.0

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
    drawn = {collection.get_label(): collection.get_offsets().tolist() for collection in axes.collections}
    assert drawn == {
        "WRONG answer when it ran": [[1.0, 0.1]], "measured": [[2.5, 0.25]], "other tokens when it ran": [[3.0, 0.3]],
    }  # fmt: skip
