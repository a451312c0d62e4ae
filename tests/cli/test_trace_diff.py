"""`sfi trace diff` from the outside."""

import json

import pytest

from sfi_traces.model.trace import Trace
from tests.cli.trace_commands import trace
from tests.traces.made import CONFIG, make_trace
from tests.traces.small import fixed_folder, rows, write_part

recorded = fixed_folder(steps=30, policy="sfi")


@pytest.fixture
def other(tmp_path):
    return make_trace(tmp_path / "other", steps=40, seed=3, config=CONFIG | {"budget": 30})


def part_ways(trace, text: str) -> None:
    """Give the sixth token another text."""
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


def test_limits_that_hold_end_with_one_and_say_which(recorded, other):
    part_ways(other, " elsewhere")
    limits = ("first_difference<100", "equal_share<0.5", "overlap<0.9")
    ended = trace("diff", recorded, other, *(f"--fail-if={one}" for one in limits), "--json")
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
