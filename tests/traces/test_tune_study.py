"""The search and its file: shared, resumed, and refused where it was made for something else."""

import signal
from pathlib import Path

import pytest

from sfi_cli.commands.tune import tune_text
from sfi_cli.terminal.tables import rendered
from sfi_core.errors import InputError, SfiError
from sfi_traces.model.trace import Trace
from sfi_traces.tune.result import TuneResult, find
from sfi_traces.tune.study import Purpose, Search
from sfi_traces.tune.tuning import Limits, Tuning, costs, objectives
from tests.traces.made import CONFIG, make_trace
from tests.traces.small import fixed_trace

PURPOSE = Purpose(traces="t", space="s", objectives="o")
DIRECTIONS = ("minimize", "maximize")
trace = fixed_trace(requests=2, seed=3)


def tuning(*traces: Trace, limits: Limits | None = None, names=(), **axes) -> Tuning:
    return Tuning.of(traces, axes=axes, trigger_sets={}, objectives=objectives(list(names)), limits=limits or Limits())


def suggest(trial) -> tuple[int, int]:
    return trial.suggest_int("x", 0, 9), trial.suggest_categorical("y", [1, 2])


def measure(setting) -> tuple[list[float], dict[str, float]]:
    return [setting[0], setting[0] * setting[1]], {"limit": setting[0] - 7}


def open_(path: Path, purpose: Purpose = PURPOSE, **options) -> Search:
    return Search.open(path, purpose, DIRECTIONS, **options)


def test_a_study_has_the_trials_that_were_asked_for_and_is_gone_on_with(tmp_path):
    search = open_(tmp_path / "s.journal")
    told: list[int] = []
    assert not search.run(suggest, measure, 12, first={"x": 5, "y": 2}, on_trial=told.append)
    assert told == list(range(1, 13))
    assert search.complete()[0].params == {"x": 5, "y": 2}
    again = open_(tmp_path / "s.journal", resume=True)
    assert (search.created, again.created) == (True, False)
    again.run(suggest, measure, 12, first={"x": 1, "y": 1})
    assert len(again.complete()) == 12
    again.run(suggest, measure, 15)
    assert [trial.number for trial in again.complete()] == list(range(15))
    assert all(trial.params["x"] <= 7 for trial in again.best())


def test_equal_settings_are_measured_once_whoever_tried_them(tmp_path):
    measured = []

    def noted(setting):
        measured.append(setting)
        return measure(setting)

    open_(tmp_path / "s.journal").run(suggest, noted, 30)
    search = open_(tmp_path / "s.journal", resume=True)
    search.run(suggest, noted, 60)
    assert len(measured) == len(set(measured)) <= 20
    for trial in search.complete():
        values, constraints = measure((trial.params["x"], trial.params["y"]))
        assert (trial.values, trial.constraints) == (values, constraints)


def test_a_trial_too_many_is_dropped(tmp_path, monkeypatch):
    """Two workers ask for the last trial at once: the one with the higher number gives up."""
    search = open_(tmp_path / "s.journal")
    search.run(suggest, measure, 4)
    ask, faster = search.study.ask, []

    def raced():
        faster.append(ask())
        return ask()

    monkeypatch.setattr(search.study, "ask", raced)
    search.run(suggest, measure, 5)
    states = [trial.state.name for trial in search.study.get_trials()]
    assert states == ["COMPLETE"] * 4 + ["RUNNING", "FAIL"]
    search.run(suggest, measure, 5)  # the last one is under way elsewhere
    assert len(faster) == 1
    search.study.tell(faster[0], [1.0, 1.0])
    assert len(search.complete()) == 5


def test_ctrl_c_finishes_the_trial_under_way(tmp_path):
    def interrupted(setting):
        signal.raise_signal(signal.SIGINT)
        return measure(setting)

    search = open_(tmp_path / "s.journal")
    before = signal.getsignal(signal.SIGINT)  # another test of this process may have run the command line
    assert search.run(suggest, interrupted, 10)
    assert len(search.complete()) == 1
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("content", [b"hello\n", b'{"op_code": 0, "worker_id": "a"}\nhello\nworld\n', b"\xff\xfe\n"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "s.journal"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is damaged, or no journal") as caught:
        open_(path, resume=True)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize("cut", [1, 30, None])
def test_a_torn_last_line_costs_a_trial_at_most(tmp_path, cut):
    """A full disk or a crash tears it; None tears the very first line."""
    path = tmp_path / "s.journal"
    open_(path).run(suggest, measure, 8)
    data = path.read_bytes()
    path.write_bytes(data[:9] if cut is None else data[:-cut])
    for trials in (10, 12):  # the first one to go on would write behind the torn line
        search = open_(path, resume=True)
        search.run(suggest, measure, trials)
        assert trials - 1 <= len(search.complete()) <= trials


def test_a_worker_goes_on_behind_another_s_torn_line(tmp_path):
    path = tmp_path / "s.journal"
    search = open_(path)
    search.run(suggest, measure, 2)
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"worker_id"')
    search.run(suggest, measure, 4)
    assert len(open_(path, resume=True).complete()) == 4


def searched(path: Path, own: Tuning, trials: int = 40, **options) -> TuneResult:
    return find(own, own.open(path, **options), trials)


def test_nothing_tried_beats_the_front(tmp_path, trace):
    own = tuning(trace)
    found = searched(tmp_path / "s.journal", own)
    data = found.document()
    assert len(data["points"]) == data["trials"] == 40
    front = [costs(one.outcome, own.objectives) for one in found.front]
    assert front == sorted(front)
    tried = [(bytes_, -kept) for bytes_, kept in data["points"]]
    for cost, kept in front:
        assert not any(other[0] <= cost and other[1] <= kept and other != (cost, kept) for other in tried)
    for point in tried:
        assert any(cost <= point[0] and kept <= point[1] for cost, kept in front)
    assert [row["chosen"] for row in data["front"]].index(True) == found.chosen


def test_one_worker_and_a_seed_try_the_same_settings(tmp_path, trace):
    own = tuning(trace)
    points = [
        searched(tmp_path / f"{name}.journal", own, 15, seed=seed).document()["points"]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert points[0] == points[1] != points[2]


def test_every_setting_of_the_front_keeps_the_limits(tmp_path, trace):
    limits = Limits(min_retained=0.25, max_read=0.6)
    found = searched(tmp_path / "s.journal", tuning(trace, limits=limits))
    assert all(limits.kept_by(one.outcome) for one in found.front)
    assert found.chosen == 0  # the cheapest
    kept = [point[1] for point in found.document()["points"]]
    assert min(kept) < 0.25


def test_limits_that_nothing_keeps_say_how_close_it_came(tmp_path, trace):
    own = tuning(trace, limits=Limits(min_retained=0.99, max_read=0.3), trigger_policy="boundary")
    search = own.open(tmp_path / "s.journal")
    with pytest.raises(SfiError, match=r"keep at least 0\.99 and read at most 0\.3, got none in 20"):
        find(own, search, 20)
    assert len(search.complete()) == 20
    with pytest.raises(SfiError, match="no trial was finished; go on with --study"):
        find(tuning(trace), tuning(trace).open(tmp_path / "t.journal"), 0)


def test_a_study_of_other_traces_or_objectives_is_refused(tmp_path, trace):
    path = tmp_path / "s.journal"
    searched(path, tuning(trace), 2)
    other = Trace.open(make_trace(tmp_path / "other", created="2026-11-22T10:00:00+00:00"))
    for own, message in (
        (tuning(trace, other), "with other traces"),
        (tuning(trace, names=["slow-rate", "retained"]), "with other objectives"),
        (tuning(trace, limits=Limits(max_read=0.5)), "with other objectives"),
        (tuning(trace, t_max="8,16"), "with other search space; choose"),
        (tuning(trace, t_max="8", limits=Limits(max_read=0.5)), "with other search space and objectives;"),
    ):
        with pytest.raises(InputError, match=message):
            own.open(path, resume=True)
    assert not tuning(trace).open(path, resume=True).created


def test_a_budget_beyond_the_audit_s_is_cut_to_it_and_the_table_says_so(tmp_path):
    """The default budget is larger than what an audit records by default."""
    wide = Trace.open(make_trace(tmp_path / "b", config=CONFIG | {"budget": 2048}))
    top = wide.manifest["audit"]["top"]
    tuned = tuning(wide)
    assert tuned.space.base.config.budget == top
    found = find(tuned, tuned.open(tmp_path / "s.journal"), 5)
    assert f"but for its budget of 2,048: the audit recorded {top}; >" in rendered(tune_text(found.document()))
