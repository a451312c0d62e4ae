"""Traces of lossless runs: their rows, and what adds up."""

import pytest

from sfi_traces.model.trace import Trace
from sfi_traces.read.check import check
from sfi_traces.record.parquet import ParquetObserver
from tests.traces.lossless import LosslessRun
from tests.traces.small import change_manifest, rows
from tests.traces.test_stability import rewrite

REQUESTS = (60, 45)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lossless") / "run"
    with ParquetObserver(folder) as observer:
        run = LosslessRun(observer, most=REQUESTS)
    return Trace.open(folder), run


@pytest.fixture
def folder(tmp_path):
    with ParquetObserver(tmp_path / "run") as observer:
        LosslessRun(observer, most=REQUESTS)
    return tmp_path / "run"


def problems(folder) -> list[str]:
    return check(Trace.open(folder))["problems"]


def test_verifications_and_steps_are_what_was_told(told):
    trace, run = told
    assert trace.lossless
    assert trace.manifest["config"]["draft"]["max_tokens"] == 6
    found = rows(trace, "verifications")
    assert found == [{name: getattr(event, name) for name in found[0]} for event in run.verifications]
    assert any(row["accepted"] < row["drafted"] for row in found)
    for request, tokens in enumerate(run.tokens):
        steps = [row for row in rows(trace, "steps") if row["request"] == request]
        assert [row["token_id"] for row in steps] == tokens
        assert [row["step"] for row in steps] == [*range(REQUESTS[request])]
        kept = [row for row in steps if row["drafted"]]
        assert all(row["draft_token_id"] == row["token_id"] and not row["slow"] for row in kept)
        own = [row for row in found if row["request"] == request]
        assert len(kept) == sum(row["accepted"] for row in own)
        others = {row["step"] for row in steps if row["draft_token_id"] == 88}
        assert others == {row["step"] for row in own if row["accepted"] < row["drafted"]}


def test_a_lossless_trace_is_sound(told):
    document = check(told[0])
    assert (document["problems"], document["notes"], document["steps_checked"]) == ([], [], True)


def nth(folder, number: int, table: str, **changes):
    """Change one row of a table: the step, or the verification with drafts, of that number."""

    def change(found):
        wanted = [row for row in found if table == "steps" or row["drafted"] > row["accepted"] > 0]
        wanted[number] |= changes
        return found

    rewrite(folder, table, change)


@pytest.mark.parametrize(
    ("table", "changes", "words"),
    [
        ("verifications", {"accepted": 0}, "must give 1 tokens, got"),
        ("verifications", {"drafted": 9}, "drafted must be in 0 to 6, got 9"),
        ("verifications", {"accepted": 7}, "accepted must be in 0 to"),
        ("verifications", {"base": 1}, "base must be 50, got 1"),
        ("verifications", {"reason": "rejected"}, "reason must not be rejected with 0"),
        ("verifications", {"reason": "stop"}, "reason of its step must be stop, got"),
        ("verifications", {"batch_step": 99}, "batch_step of its step must be 99, got"),
        ("steps", {"drafted": False}, "tokens before its own must be drafted, in fast steps"),
        ("steps", {"slow": True}, "tokens before its own must be drafted, in fast steps"),
        ("steps", {"draft_token_id": 7}, "step 1 must keep the drafted token 7, got 1"),
        ("steps", {"token_id": 7}, "step 1 must keep the drafted token 1, got 7"),
    ],
)
def test_a_sum_that_is_wrong_is_named(folder, table, changes, words):
    nth(folder, {"steps": 2, "verifications": 0}[table], table, **changes)
    assert any(words in line for line in problems(folder)), problems(folder)


def test_a_verification_or_a_step_that_is_missing_is_named(folder):
    rewrite(folder, "verifications", lambda found: found[:-1])
    assert any("must follow from a verification, got none" in line for line in problems(folder))
    rewrite(folder, "verifications", lambda found: found[1:])
    assert any("base must be 50, got" in line for line in problems(folder))


def test_another_token_than_the_draft_needs_a_rejection_and_a_rejection_one(folder):
    def agree(found):
        (first, *_) = [row for row in found if row["draft_token_id"] == 88]
        first["draft_token_id"] = None
        return found

    rewrite(folder, "steps", agree)
    assert any("must have another token than the drafted one" in one for one in problems(folder))


def test_a_plain_trace_has_no_verifications(folder):
    count = len(rows(Trace.open(folder), "verifications"))
    change_manifest(folder, lossless=False)
    assert f"a plain run must have no verifications, got {count}" in problems(folder)


def test_a_killed_run_may_have_a_verification_without_its_steps(folder):
    rewrite(folder, "steps", lambda found: [row for row in found if row["step"] < 20])
    kept = [row for row in rows(Trace.open(folder), "verifications") if row["step"] < 20]
    last = {row["request"]: row["step"] for row in kept}
    whole = lambda found: [r for r in found if r["step"] <= last[r["request"]]]  # noqa: E731
    rewrite(folder, "steps", whole)
    change_manifest(folder, finished=None, tables={})
    assert problems(folder) == []
    change_manifest(folder, finished="2026-11-22T10:00:00+00:00")
    assert any("must give" in line for line in problems(folder))


def test_a_redacted_trace_hides_drafts_and_still_adds_up(tmp_path):
    with ParquetObserver(tmp_path / "run", redact_text=True) as observer:
        LosslessRun(observer)
    trace = Trace.open(tmp_path / "run")
    assert {row["draft_token_id"] for row in rows(trace, "steps")} == {None}
    assert problems(trace.path) == []
    nth(trace.path, 0, "verifications", accepted=0)
    assert any("must give 1 tokens" in line for line in problems(trace.path))
