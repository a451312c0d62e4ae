"""The search, and the front that it finds."""

import pytest

from sfi_cli.commands.tune import tune_text
from sfi_cli.terminal.tables import rendered
from sfi_core.errors import SfiError
from sfi_traces.model.trace import Trace
from sfi_traces.tune.result import find
from sfi_traces.tune.tuning import Limits, Tuning, costs
from tests.traces.made import CONFIG, make_trace
from tests.traces.small import fixed_trace

trace = fixed_trace(requests=2, seed=3)


def tuning(*traces: Trace, limits: Limits | None = None, **axes) -> Tuning:
    return Tuning.of(traces, axes=axes, trigger_sets={}, limits=limits or Limits())


def test_a_search_begins_with_the_trace_s_own_setting_and_tells_of_each_trial(trace):
    told: list[int] = []
    own = tuning(trace, recent="16,20")
    found = find(own, 12, on_trial=told.append)
    assert told == list(range(1, 13))
    outcome = own.outcome(own.space.base)
    assert found.document()["points"][0] == [outcome.bytes_per_token, outcome.retained_mass]


def test_ctrl_c_leaves_the_trials_before_it(trace):
    def interrupted(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    found = find(tuning(trace), 10, on_trial=interrupted)
    assert (found.interrupted, found.document()["trials"]) == (True, 2)


def test_nothing_tried_beats_the_front(trace):
    own = tuning(trace)
    found = find(own, 40)
    data = found.document()
    assert len(data["points"]) == data["trials"] == 40
    front = [costs(candidate.outcome) for candidate in found.front]
    assert front == sorted(front)
    tried = [(bytes_, -kept) for bytes_, kept in data["points"]]
    for cost, kept in front:
        assert not any(other[0] <= cost and other[1] <= kept and other != (cost, kept) for other in tried)
    for point in tried:
        assert any(cost <= point[0] and kept <= point[1] for cost, kept in front)
    assert [row["chosen"] for row in data["front"]].index(True) == found.chosen


def test_a_seed_tries_the_same_settings(trace):
    own = tuning(trace)
    points = [find(own, 15, seed=seed).document()["points"] for seed in (1, 1, 2)]
    assert points[0] == points[1] != points[2]


def test_every_setting_of_the_front_keeps_the_limits(trace):
    limits = Limits(min_retained=0.25, max_read=0.6)
    found = find(tuning(trace, limits=limits), 40)
    assert all(limits.kept_by(candidate.outcome) for candidate in found.front)
    assert found.chosen == 0  # the cheapest
    kept = [point[1] for point in found.document()["points"]]
    assert min(kept) < 0.25


def test_limits_that_nothing_keeps_say_how_close_it_came(trace):
    own = tuning(trace, limits=Limits(min_retained=0.99, max_read=0.3), trigger_policy="boundary")
    with pytest.raises(SfiError, match=r"keep at least 0\.99 and read at most 0\.3, got none in 20"):
        find(own, 20)


def test_a_budget_beyond_the_audit_s_is_cut_to_it_and_the_table_says_so(tmp_path):
    """The default budget is larger than what an audit records by default."""
    wide = Trace.open(make_trace(tmp_path / "b", config=CONFIG | {"budget": 2048}))
    top = wide.manifest["audit"]["top"]
    tuned = tuning(wide)
    assert tuned.space.base.config.budget == top
    found = find(tuned, 5)
    assert f"but for its budget of 2,048: the audit recorded {top}; >" in rendered(tune_text(found.document()))
