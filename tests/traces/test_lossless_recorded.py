"""A trace of a lossless run of the bundled checkpoint says what happened, and changes no token."""

from functools import cache
from typing import Any

import pytest

from sfi_core import SfiConfig
from sfi_core.policies import POLICIES
from sfi_core.settings.engine import EngineOptions
from sfi_traces.model.check import check
from sfi_traces.model.trace import Trace
from sfi_traces.record.parquet import ParquetObserver
from tests.traces.small import rows, section
from tests.traces.test_recorded import bundled, complete

CASES: dict[str, dict[str, Any]] = {
    "boundary": {},
    "paper": {"slow_start": 1, "trigger_delay": 0, "span": 0, "t_max": 7},
    "codescan": {"budget": 1, "recent": 2, "codescan": {"rest": 0.0}},
}
LOSSLESS = EngineOptions(lossless=True)


def settings(name: str) -> SfiConfig:
    small = {"budget": 6, "recent": 8, "sink": 2, "window_prefill": 4}
    return SfiConfig().replace(**(small | CASES[name]))


def ids_of(result: Any) -> list[list[int]]:
    return [request.token_ids for request in result.report.requests]


@cache
def plain() -> list[list[int]]:
    """Full attention's tokens."""
    return ids_of(complete(SfiConfig(), policy="full-kv"))


@pytest.mark.parametrize("name", CASES)
def test_a_lossless_trace_is_sound_and_changes_no_token(tmp_path, name):
    config, policy = settings(name), name if name in POLICIES else "sfi"
    untraced = ids_of(complete(config, policy=policy, engine=LOSSLESS))
    with ParquetObserver(tmp_path / "run", tokenizer=bundled()[1]) as observer:
        traced = ids_of(complete(config, policy=policy, engine=LOSSLESS, observers=[observer]))
    trace = Trace.open(tmp_path / "run")
    assert trace.lossless
    document = check(trace)
    assert (document["problems"], document["steps_checked"]) == ([], True)
    steps = rows(trace, "steps")
    for request, tokens in enumerate(traced):
        own = [row["token_id"] for row in steps if row["request"] == request]
        assert own == tokens == untraced[request] == plain()[request]
    layers = trace.manifest["model"]["layers"]
    row = sum(one["heads"] * (one["key_width"] + one["value_width"]) * one["itemsize"] for one in layers)
    for one in steps:
        whole = row * one["cached_tokens"]
        assert one["moved_bytes"] == whole if one["fast_requests"] == 0 else one["moved_bytes"] < whole
    assert {one["fast_requests"] == 0 for one in steps} == {True, False}
    keys = [tuple(row[n] for n in ("request", "step", "layer", "head")) for row in rows(trace, "selections")]
    assert len(keys) == len(set(keys))
    drafted, told = (
        {(row["request"], row["step"]) for row in kept}
        for kept in (
            [row for row in steps if row["drafted"]],
            [row for row in rows(trace, "selections") if row["step"]],
        )
    )
    assert told == drafted if policy != "sfi" else told and not told & drafted
    found = section(trace, "lossless")
    assert 0 < found["accepted"] < found["drafted"]
    assert found["tested"] == len(rows(trace, "logits"))


def test_a_drafted_stop_token_ends_the_request_as_its_verification_s_own(tmp_path):
    config = settings("boundary").replace(budget=24, recent=16)
    with ParquetObserver(tmp_path / "whole") as observer:
        whole = ids_of(complete(config, engine=LOSSLESS, observers=[observer]))
    first = [row for row in rows(Trace.open(tmp_path / "whole"), "steps") if not row["request"]]
    new = [row for row in first if row["token_id"] not in whole[0][: row["step"]]]
    stop = next(row["token_id"] for row in reversed(new) if row["drafted"])
    with ParquetObserver(tmp_path / "run") as observer:
        complete(config, engine=LOSSLESS, observers=[observer], stop_token_ids=(stop,))
    trace = Trace.open(tmp_path / "run")
    assert check(trace)["problems"] == []
    *kept, last = (row for row in rows(trace, "steps") if not row["request"])
    assert [row["token_id"] for row in kept] == whole[0][: whole[0].index(stop)]
    assert (last["token_id"], last["draft_token_id"], last["slow"]) == (stop, stop, True)
    found = section(trace, "lossless", request=0)
    given = sum(r["accepted"] for r in rows(trace, "verifications") if not r["request"])
    assert sum(one["accepted"] for one in found["depths"]) == found["accepted"] == given + 1
