"""Perfetto's own trace processor finds in the timeline what the trace's tables have."""

from collections import Counter
from pathlib import Path

import pytest

from sfi_traces.export.perfetto import perfetto_text
from sfi_traces.model.trace import Trace
from tests.traces.made import LAYERS
from tests.traces.small import make_ranks, rewrite, rows
from tests.traces.trace_processor import trace_processor

STEPS = 25
SLICES = """
    SELECT process.pid, process.name AS process, thread.name AS thread, slice.name, slice.category, dur,
        extract_arg(slice.arg_set_id, 'args.step') AS step
    FROM slice JOIN thread_track ON slice.track_id = thread_track.id
    JOIN thread USING (utid) JOIN process USING (upid) ORDER BY slice.ts, slice.dur DESC
"""
COUNTERS = """
    SELECT counter_track.name, counter.value
    FROM counter JOIN counter_track ON counter.track_id = counter_track.id ORDER BY counter.ts
"""
FLOWS = """
    SELECT one.name AS begins, two.name AS ends, two.ts > one.ts AS later, first.upid = second.upid AS same
    FROM flow JOIN slice one ON one.id = slice_out JOIN slice two ON two.id = slice_in
    JOIN thread_track a ON a.id = one.track_id JOIN thread first ON first.utid = a.utid
    JOIN thread_track b ON b.id = two.track_id JOIN thread second ON second.utid = b.utid
"""
LOST = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    """A run of two ranks."""
    folder: Path = make_ranks(tmp_path_factory.mktemp("processor") / "run", steps=STEPS, sentence=9)
    for rank, path in enumerate((folder, folder / "rank-00001")):
        rewrite(path, "timings", lambda found, rank=rank: [_on(rank, row) for row in found])
    return Trace.open(folder)


def _on(rank: int, row: dict) -> dict:
    # a made-up pack reaches into the next layer, as no stream's does: the processor drops what overlaps
    share = 0.25 if row["name"] == "pack" else 1.0
    return row | {"rank": rank, "elapsed_us": share * row["elapsed_us"]}


def test_the_trace_processor_counts_what_the_tables_have(browser, trace):
    text = "".join(perfetto_text(trace, lambda done, total: None))
    with trace_processor(browser, text.encode()) as processor:
        slices, counters = processor.rows(SLICES), processor.rows(COUNTERS)
        flows, lost = processor.rows(FLOWS), processor.rows(LOST)
    assert lost == []

    spans, steps = rows(trace, "timings"), rows(trace, "steps")
    by_track = Counter((one["pid"], one["thread"], one["name"]) for one in slices)
    expected = Counter((1 + span["rank"], "main", span["name"]) for span in spans)
    kinds = ("slow" if step["slow"] else "fast" for step in steps)
    assert by_track == expected + Counter((1, "steps of request 0", kind) for kind in kinds)
    assert {(one["pid"], one["process"]) for one in slices} == {
        (1 + rank, f"sfi sfi on made-up, rank {rank} of 2") for rank in (0, 1)
    }
    taken_ns = sum(one["dur"] for one in slices if one["name"] == "attention.fast")
    wanted_us = sum(span["elapsed_us"] for span in spans if span["name"] == "attention.fast")
    assert taken_ns / 1e3 == pytest.approx(wanted_us, rel=1e-5)
    shown = [one for one in slices if one["thread"] == "steps of request 0"]
    assert [int(one["step"]) for one in shown] == [step["step"] for step in steps]

    attended = [one["value"] for one in counters if "attended" in one["name"]]
    assert attended == [step["attended_tokens"] for step in steps]
    assert len(counters) == 2 * len(steps)

    refreshes = [step["step"] for step in steps if step["slow"]]
    assert len(flows) == 2 * LAYERS * len(refreshes)
    assert {tuple(flow.values()) for flow in flows} == {("selector", "attention.fast", 1, 1)}
