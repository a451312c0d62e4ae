"""`sfi trace replay` and `sfi trace diff`: tables, JSON, and what is refused."""

import json
import shutil

import pytest

from sfi_core.errors import ConfigError
from sfi_traces.model.trace import Trace
from tests.cli.trace_commands import trace, ways
from tests.traces.made import CONFIG, make_trace
from tests.traces.small import change_manifest, fixed_folder, rows, write_part

full = fixed_folder(requests=2, seed=1)
real = fixed_folder(requests=2, seed=2, policy="sfi")
invoke, document, refused = ways("trace", "replay")


def test_a_grid_has_a_row_for_each_counterfactual_fastest_first(full):
    data = document(full, "--t-max=4,16", "--budget=5,10,20", "--trigger-policy=boundary,never")
    rows = data["rows"]
    assert len(rows) == 2 * 3 + 3
    assert [row["speedup"] for row in rows] == sorted((r["speedup"] for r in rows), reverse=True)
    assert (data["policy"], data["audit_top"]) == ("full-kv", 24)
    assert (data["heads"], data["layers"]) == (4, [0, 1])
    assert [request["steps"] for request in data["requests"]] == [60, 60]
    assert data["validation"] is None
    recorded_rows = [row for row in rows if row["recorded"]]
    assert [(row["policy"], row["t_max"], row["budget"]) for row in recorded_rows] == [("boundary", 16, 20)]
    assert recorded_rows[0]["trigger_token_ids"] == [90]
    assert recorded_rows[0]["reasons"] == {"first": 2, "trigger": 10}
    never = [row for row in rows if row["policy"] == "never"]
    assert {row["slow_steps"] for row in never} == {2}
    assert {row["t_max"] for row in never} == {None}
    assert rows[0]["pareto"]


def test_the_table_shows_the_document(full):
    arguments = (full, "--budget", "5,20", "--t-max", "4,16")
    text, data = invoke(*arguments).stdout, document(*arguments)
    lines = [line for line in text.splitlines() if line.endswith("x")]
    assert len(lines) == 4
    for line, row in zip(lines, data["rows"], strict=True):
        assert ("*" in line[:8]) == row["recorded"]
        assert ("+" in line[:8]) == row["pareto"]
        for shown in (
            f" {row['t_max']} ", f" {row['budget']} ", f"{row['slow_rate']:.1%}",
            f"{row['retained_mass']:.3f}", f"{row['speedup']:.2f}x",
        ):  # fmt: skip
            assert shown in line
    assert "Everywhere: trigger policy boundary, triggers recorded, gap 0, delay 0" in text
    assert "* the trace's own setting." in text


def test_budgets_beyond_the_audit_s_are_left_out_and_named(full, tmp_path):
    rows, text = document(full, "--budget", "5,24,64,1000"), invoke(full, "--budget", "5,24,64,1000").stdout
    assert {row["budget"] for row in rows["rows"]} == {5, 24}
    assert rows["budgets_left_out"] == [64, 1000]
    assert "left out budget 64, 1000: the audit recorded 24 positions; --set audit.top=1000 records as many.\n" in text
    assert "budget must be at most the audit's 24 positions, got 64" in str(refused(full, "--budget", "64"))
    folder = make_trace(tmp_path / "own", steps=20, policy="sfi", config=CONFIG | {"budget": 64})
    data = document(folder, "--t-max", "4,8")
    assert ({row["budget"] for row in data["rows"]}, data["budget_cut_from"]) == ({24}, 64)
    assert "budget 64 is replayed as 24: the audit recorded 24 positions" in invoke(folder, "--t-max", "4,8").stdout


def test_overlaps_of_other_sizes_are_not_compared(full, real, tmp_path):
    other = change_manifest(shutil.copytree(real, tmp_path / "other"), audit={"every": 1, "top": 12, "layers": None})
    validation, text = document(full, "--against", other)["validation"], invoke(full, "--against", other).stdout
    assert [validation[name]["overlap_at_reuse"] for name in ("predicted", "measured")] == [None, None]
    assert validation["measured"]["retained_mass"] < 1
    assert "overlap: not compared, since audit.top of the two traces differs" in text


def test_trigger_sets_are_compared_by_name(full):
    """Made-up words come every ten steps: " cat" after "the", and so on."""
    sets = ("--trigger-set", "dots=. \\n", "--trigger-set", "animals=cat dog", "--trigger-set", ";")
    data = document(full, *sets, "--trigger=.", "--set=trigger_token_ids=1", "--t-max=1000")
    by_triggers = {row["triggers"]: row for row in data["rows"]}
    assert by_triggers["dots"]["trigger_token_ids"] == [90]
    assert len(by_triggers["animals"]["trigger_token_ids"]) == 12  # other ids each time
    assert by_triggers["animals"]["slow_steps"] == 2 + 24
    assert by_triggers[";"]["trigger_token_ids"] == []
    assert by_triggers[";"]["slow_steps"] == 2
    assert by_triggers[". 1"]["trigger_token_ids"] == [1, 90]
    assert "note: no generated token matches the triggers ';'" in invoke(full, *sets).stderr


def test_an_sfi_trace_shows_what_it_measured(real):
    data, text = document(real), invoke(real).stdout
    validation = data["validation"]
    assert data["rows"][0]["retained_mass"] == validation["predicted"]["retained_mass"]
    assert validation["same_schedule"]
    assert 0.7 < validation["measured"]["retained_mass"] < 0.9
    assert "predicted and measured" in text
    assert "request 1: 60 of 60 steps compared" in text
    assert document(real, "--budget", "5")["validation"] is None  # nobody measured that


def test_a_prediction_beside_another_run(full, real):
    data = document(full, "--against", real)
    assert (data["rows"], data["against"]) == ([], str(real))
    assert [request["steps"] for request in data["validation"]["requests"]] == [60, 60]
    text = invoke(full, "--against", real).stdout
    assert f"The setting of {real}: predicted and measured" in text
    measured = data["validation"]["measured"]["retained_mass"]
    assert f"{measured:.3f}" in next(line for line in text.splitlines() if "measured  " in line)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--t-max", "x"], ConfigError, "t_max must be whole numbers, got 'x'"),
        (["--t-max", ","], ConfigError, "t_max must be whole numbers, got ''"),
        (["--budget", "0"], ConfigError, "budget must be positive, got 0"),
        (["--set=stride=4"], ConfigError, "must come with --trigger-policy stride, got boundary"),
        (["--trigger-policy", "never", "--trigger", "."], ConfigError, "triggers must come with"),
        (["--set=trigger_seed=1"], ConfigError, "must come with --trigger-policy random"),
        (["--trigger-set", "a=.", "--trigger-set", "a=!"], ConfigError, "got 'a' twice"),
        (["--request", "7"], ConfigError, "request must be one of 0 to 1, got 7"),
        (["--against", "x", "--t-max", "3"], ConfigError, "must come without others"),
        (["--play", "--budget", "3"], ConfigError, "must come without other settings"),
        (["--play", "-o", "x"], ConfigError, "must come without other settings"),
        (["--play"], ConfigError, "play must be in a terminal; sfi trace show --step N prints a step"),
    ],
)
def test_bad_options_are_refused(full, arguments, kind, message):
    error = refused(full, *arguments)
    assert isinstance(error, kind)
    assert message in str(error)


def test_the_data_may_go_to_a_file(full, tmp_path):
    path = tmp_path / "replay.json"
    result = invoke(full, "--json", "-o", str(path))
    assert result.stdout == ""
    assert json.loads(path.read_text()) == document(full)


recorded = fixed_folder(steps=30, policy="sfi")


@pytest.fixture
def other(tmp_path):
    return make_trace(tmp_path / "other", steps=40, seed=3, config=CONFIG | {"budget": 30})


def part_ways(trace, text: str) -> None:
    steps = rows(Trace.open(trace), "steps")
    steps[5] |= {"token_id": 8, "token_text": text}
    write_part(trace, "steps", steps)


def test_diff_shows_what_its_document_says(recorded, other):
    ended = trace("diff", recorded, other)
    document = json.loads(trace("diff", recorded, other, "--json").stdout)
    assert (ended.code, ended.stderr) == (0, "")
    for words in (
        f"A  {recorded}\nB  {other}\n",
        "budget: 20 in A, 30 in B",
        "policy: sfi in A, full-kv in B",
        "request 0: 100.0% of the first 30 tokens are equal (30 in A, 40 in B)",
        "slow in B only, among the first 30 steps: 1 2 3 4 5 6 7 8 9 11 12 13 14 15 16 17 ...",
        f"{document['ratios']['read_ratio']:.2f}x",
        f"{document['supports']['overlap']['mean']:.3f}",
        "Overlap of the supports at equal steps",
    ):
        assert words in ended.stdout
    assert "Overlap of the selections" not in ended.stdout


def test_diff_shows_where_the_tokens_part(recorded, other):
    part_ways(other, " elsewhere")
    text = trace("diff", recorded, other).stdout
    assert "request 0: 96.7% of the first 30 tokens are equal" in text
    assert "they part at step 5, after ' the cat sat on a': ' mat' in A, ' elsewhere' in B" in text


@pytest.mark.exhaustive
def test_limits_that_hold_end_with_one_and_say_which(recorded, other):
    part_ways(other, " elsewhere")
    limits = ("first_difference<100", "equal_share<0.5", "overlap<0.9")
    ended = trace("diff", recorded, other, *(f"--fail-if={limit}" for limit in limits), "--json")
    value = json.loads(ended.stdout)["metrics"]["overlap"]
    assert ended.code == 1
    assert ended.stderr == (
        f"failed: first_difference<100, first_difference is 5\nfailed: overlap<0.9, overlap is {value:.6g}\n"
    )
    assert trace("diff", recorded, other, "--fail-if", "speed<0").code == 0
    ended = trace("diff", recorded, other, "--fail-if", "speed~1")
    assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    ended = trace("diff", recorded, other, "--fail-if", "selection_overlap<1")
    assert (ended.code, ended.stdout) == (3, "")
    assert "needs selection_overlap, which the traces do not have; record both" in ended.stderr
