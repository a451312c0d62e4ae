"""The smoke run's own parts: what it sums up of a timeline, and what it keeps when something fails."""

import json

import pytest
import torch

from benchmarks.smoke import journal
from benchmarks.smoke.journal import Journal
from benchmarks.smoke.plan import dry
from benchmarks.smoke.timeline import summed

CPU = torch.device("cpu")
PLAN = dry(graphs=True)


def event(name: str, begin: float, length: float) -> dict:
    return {"name": name, "ts": begin, "dur": length, "cat": "kernel"}


def test_a_timeline_tells_idle_time_and_what_ran_beside_what():
    """Main runs from 0 to 10 and from 14 to 20; the side from 8 to 12 and within the second from 15 to 17."""
    found = summed(
        [
            event("gemm", 0, 10), event("_selector_row_kernel", 8, 4), event("gemm", 14, 6),
            event("_top_k_count_kernel", 15, 2),
        ]
    )  # fmt: skip
    assert {name: value for name, value in found.items() if name != "top"} == {
        "nodes": 4, "span_us": 20, "added_us": 22, "busy_us": 18, "idle_us": 2, "several_at_once_us": 4,
        "side_us": 6, "side_beside_main_us": 4,
    }  # fmt: skip
    assert [(one["name"], one["calls"], one["us"]) for one in found["top"]] == [
        ("gemm", 2, 16), ("_selector_row_kernel", 1, 4), ("_top_k_count_kernel", 1, 2),
    ]  # fmt: skip


def test_a_failure_is_noted_and_the_next_stage_runs(tmp_path):
    def broken(one, _):
        one.note("first", us=3.0)
        raise ValueError("no such\nkernel")

    path = tmp_path / "x.json"
    one = Journal(CPU, path)
    stages = {1: ("a", broken), 2: ("b", lambda own, _: own.note("second", right=True))}
    assert one.run(stages, PLAN) == 1
    document = json.loads(path.read_text())
    assert document["ended"] == "whole"
    assert [stage["rows"] for stage in document["stages"]] == [
        [{"what": "first", "us": 3.0}, {"what": "stage 1", "failed": "ValueError: no such"}],
        [{"what": "second", "right": True}],
    ]


@pytest.mark.parametrize(("raised", "code"), [("lost", 1), ("interrupt", 130)])
def test_a_lost_device_or_ctrl_c_ends_the_run_and_keeps_what_there_is(tmp_path, monkeypatch, raised, code):
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(journal.torch.cuda, "synchronize", synchronize)

    def stage(own, _):
        own.note("before", us=1.0)
        if raised == "interrupt":
            raise KeyboardInterrupt
        own.trial("kernel", dict)

    one = Journal(torch.device("cuda"), tmp_path / "x.json")
    assert one.run({1: ("a", stage), 2: ("b", lambda *_: pytest.fail("runs on"))}, PLAN) == code
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["ended"].endswith("in stage 1")
    assert document["stages"][0]["rows"][0] == {"what": "before", "us": 1.0}
