"""Traces of lossless runs: their rows, what adds up, what commands say; and one of the bundled checkpoint."""

import json
from functools import cache

import pytest
import torch

import sfi_core
from sfi_cli.commands.trace.diff import diff_text
from sfi_cli.commands.trace.show_views import full_text, show_text
from sfi_cli.terminal.tables import rendered
from sfi_core import EngineOptions, NullObserver, SfiConfig
from sfi_core.errors import TraceError
from sfi_core.observers.events import VerificationEvent
from sfi_core.policies import POLICIES
from sfi_traces import ParquetObserver, Trace
from sfi_traces.export.perfetto import perfetto_text
from sfi_traces.model.check import check
from sfi_traces.model.request import Request
from sfi_traces.model.supports import Supports
from sfi_traces.report import render
from sfi_traces.summary import summarize
from sfi_traces.summary.diff import compare
from sfi_traces.views.frames import playable
from tests.core.conftest import tiny_qwen3
from tests.covering import first
from tests.traces.small import rows, section
from tests.traces.test_recorded import bundled, complete

PROMPT, REQUESTS = 50, (60, 45)
TRIGGERS = (21, 77)
CONFIG = SfiConfig(
    trigger_token_ids=TRIGGERS, trigger_delay=0, slow_start=1, min_gap=0, span=0, sink=2, recent=8, budget=40,
    window_prefill=4,
).replace(draft={"max_tokens": 6, "adaptive": False})  # fmt: skip


class Run(NullObserver):
    """A lossless run of a random model: the verifications that the engine told, and the tokens of each request."""

    def __init__(self, folder, config: SfiConfig = CONFIG, **options) -> None:
        self.verifications: list[VerificationEvent] = []
        ids = torch.randint(0, 96, (len(REQUESTS), PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
        with pytest.MonkeyPatch.context() as patch, ParquetObserver(folder, **options) as observer:
            patch.setattr("sfi_traces.record.writer.SOONEST", 60.0)
            result = sfi_core.generate(
                tiny_qwen3(), None, ids, config, policy="sfi", engine=EngineOptions(lossless=True),
                max_new_tokens=[*REQUESTS], stop_token_ids=(), observers=[observer, self],
            )  # fmt: skip
        self.tokens = [request.token_ids for request in result.report.requests]

    def on_verification(self, event: VerificationEvent) -> None:
        self.verifications.append(event)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lossless") / "run"
    run = Run(folder)
    return Trace.open(folder), run


def test_verifications_and_steps_are_what_was_told(told):
    trace, run = told
    assert trace.lossless
    assert trace.manifest["config"]["draft"]["max_tokens"] == 6
    verifications = rows(trace, "verifications")
    assert verifications == [{name: getattr(event, name) for name in verifications[0]} for event in run.verifications]
    assert {row["reason"] for row in verifications} == {"trigger", "limit", "room", "rejected"}
    for request, tokens in enumerate(run.tokens):
        steps = rows(trace, "steps", request=request)
        assert [row["token_id"] for row in steps] == tokens
        assert [row["step"] for row in steps] == [*range(REQUESTS[request])]
        drafted = [row for row in steps if row["drafted"]]
        assert all(row["draft_token_id"] == row["token_id"] and not row["slow"] for row in drafted)
        of_request = rows(trace, "verifications", request=request)
        assert len(drafted) == sum(row["accepted"] for row in of_request)
        others = {row["step"] for row in steps if row["draft_token_id"] not in (None, row["token_id"])}
        assert others == {row["step"] for row in of_request if row["accepted"] < row["drafted"]}


def drafts_of(run, events=None) -> list[tuple[int, int, bool]]:
    """Place in the sentence, depth and fate of every tested draft, told step by step."""
    drafts = []
    for event in run.verifications if events is None else events:
        for depth in range(1, min(event.drafted, event.accepted + 1) + 1):
            step = event.step - event.accepted + depth - 1
            before = run.tokens[event.request][:step]
            ends = [at for at, token in enumerate(before) if token in TRIGGERS]
            place = step - 1 - ends[-1] if ends else step
            drafts.append((place, depth, depth <= event.accepted))
    return drafts


@pytest.fixture(scope="module")
def document(told) -> dict:
    return summarize(told[0])


def test_acceptance_is_counted_by_reason_place_and_depth(told, document):
    trace, run = told
    lossless, drafts = document["lossless"], drafts_of(run)
    tokens = sum(REQUESTS) - len(REQUESTS)
    drafted, accepted = (sum(getattr(event, name) for event in run.verifications) for name in ("drafted", "accepted"))
    assert (lossless["tokens"], lossless["drafted"], lossless["accepted"]) == (tokens, drafted, accepted)
    assert lossless["acceptance"] == pytest.approx(accepted / drafted)
    assert lossless["token_acceptance"] == pytest.approx(accepted / len(drafts))
    assert lossless["tokens_per_verification"] == pytest.approx(tokens / len(run.verifications))
    assert lossless["passes_per_token"] == pytest.approx((drafted + len(run.verifications)) / tokens)
    assert {row["reason"]: row["drafted"] for row in lossless["reasons"]} == {
        reason: sum(event.drafted for event in run.verifications if event.reason == reason)
        for reason in {event.reason for event in run.verifications}
    }
    for column, name in enumerate(("place", "depth")):
        assert sum(row["tested"] for row in lossless[f"{name}s"]) == len(drafts)
        for row in lossless[f"{name}s"]:
            edges = range(row[f"from_{name}"], row[f"to_{name}"] + 1)
            fates = [draft[2] for draft in drafts if draft[column] in edges]
            assert (row["tested"], row["accepted"]) == (len(fates), sum(fates))
    of_request = section(trace, "lossless", request=1)
    assert of_request["verifications"] == sum(event.request for event in run.verifications)


def test_what_was_read_counts_rejected_drafts_too(told, document):
    _, run = told
    contexts = sum(PROMPT + step for most in REQUESTS for step in range(1, most))
    read = sum(event.attended_tokens for event in run.verifications)
    for part in (document["steps"], document["lossless"]):
        assert part["read_ratio"] == pytest.approx(read / contexts)
    logits = document["logits"]
    assert logits["kl_next_token"]["n"] == document["lossless"]["tested"]
    assert logits["argmax_agreement"] == pytest.approx(document["lossless"]["token_acceptance"])


def test_the_time_of_a_token_counts_passes_without_a_step(told):
    spans = [row for row in rows(told[0], "timings") if row["step"] > 0]
    ends = [row["begin_us"] + row["elapsed_us"] for row in spans]
    seconds = (max(ends) - min(row["begin_us"] for row in spans)) / 1e6
    speed = section(told[0], "latency")["tokens_per_second"]
    assert speed == pytest.approx((sum(REQUESTS) - len(REQUESTS)) / seconds)


@pytest.mark.exhaustive
def test_show_and_diff_say_what_a_lossless_run_did(told, document, tmp_path):
    lossless = document["lossless"]
    assert f", {lossless['accepted']} of {lossless['drafted']} drafted tokens\n" in rendered(show_text(document))
    text = rendered(full_text(document))
    assert f", {lossless['accepted']} of {lossless['drafted']} drafted tokens\n" in text
    assert f"tested tokens; KL {document['logits']['kl_next_token']['mean']:.4f} nats" in text
    Run(tmp_path / "other", CONFIG.replace(budget=20))
    compared = compare(told[0], Trace.open(tmp_path / "other"))
    assert [request["equal_share"] for request in compared["requests"]] == [1.0, 1.0]
    assert diff_text(compared)


def test_what_needs_an_audit_refuses_a_lossless_trace_in_a_line(told, document):
    line = "must be of a plain run, recorded with --audit 1, got a lossless one"
    for read in (Supports.load, playable):
        with pytest.raises(TraceError, match=line):
            read(told[0])
    assert not any("--audit" in reason for reason in document["missing"])


def test_the_timeline_marks_verifications_on_the_track_of_their_request(told):
    trace, run = told
    written: list[tuple[int, int]] = []
    text = "".join(perfetto_text(trace, lambda done, total: written.append((done, total))))
    events = json.loads(text)["traceEvents"]
    assert written[-1] == (len(events), len(events))
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = {(tracks[e["tid"]], e["args"]["step"]): e for e in events if e["ph"] == "X" and e["name"] == "slow"}
    marks = [event for event in events if event["ph"] == "i"]
    assert len(marks) == len(run.verifications)
    wanted = {(f"steps of request {event.request}", event.step): event for event in run.verifications}
    for mark in marks:
        key = (tracks[mark["tid"]], mark["args"]["step"])
        told_of = wanted.pop(key)
        for name in ("base", "drafted", "accepted", "reason"):
            assert mark["args"][name] == getattr(told_of, name)
        assert mark["ts"] == slices[key]["ts"]


def test_the_report_has_the_numbers(told):
    pytest.importorskip("plotly")
    page = render(Request(told[0]))
    lossless = section(told[0], "lossless", request=0)
    assert f"{lossless['accepted']} of {lossless['drafted']} drafted tokens" in page
    assert page.count(": fast, drafted; attended ") == lossless["accepted"]
    left_out = lossless["drafted"] - lossless["accepted"]
    assert f"{left_out} drafting passes without a step of their own are left out" in page


CASES = {
    "boundary": {},
    "paper": {"slow_start": 1, "trigger_delay": 0, "span": 0, "t_max": 7},
    "codescan": {"budget": 1, "recent": 2, "codescan": {"rest": 0.0}},
}
LOSSLESS = EngineOptions(lossless=True)


def settings(name: str) -> SfiConfig:
    small = {"budget": 6, "recent": 8, "sink": 2, "window_prefill": 4}
    return SfiConfig().replace(**(small | CASES[name]))


def ids_of(result) -> list[list[int]]:
    return [request.token_ids for request in result.report.requests]


@cache
def plain() -> list[list[int]]:
    return ids_of(complete(SfiConfig(), policy="full-kv"))


@pytest.mark.parametrize("name", first(CASES))
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
        token_ids = [row["token_id"] for row in steps if row["request"] == request]
        assert token_ids == tokens == untraced[request] == plain()[request]
    layers = trace.manifest["model"]["layers"]
    row = sum(layer["heads"] * (layer["key_width"] + layer["value_width"]) * layer["itemsize"] for layer in layers)
    for step in steps:
        whole = row * step["cached_tokens"]
        assert step["moved_bytes"] == whole if step["fast_requests"] == 0 else step["moved_bytes"] < whole
    assert {step["fast_requests"] == 0 for step in steps} == {True, False}
    keys = [tuple(row[n] for n in ("request", "step", "layer", "head")) for row in rows(trace, "selections")]
    assert len(keys) == len(set(keys))
    drafted, selected = (
        {(row["request"], row["step"]) for row in group}
        for group in (
            [row for row in steps if row["drafted"]],
            [row for row in rows(trace, "selections") if row["step"]],
        )
    )
    assert selected == drafted if policy != "sfi" else selected and not selected & drafted
    lossless = section(trace, "lossless")
    assert 0 < lossless["accepted"] < lossless["drafted"]
    assert lossless["tested"] == len(rows(trace, "logits"))


@pytest.mark.exhaustive
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
    *earlier, last = (row for row in rows(trace, "steps") if not row["request"])
    assert [row["token_id"] for row in earlier] == whole[0][: whole[0].index(stop)]
    assert (last["token_id"], last["draft_token_id"], last["slow"]) == (stop, stop, True)
    lossless = section(trace, "lossless", request=0)
    given = sum(r["accepted"] for r in rows(trace, "verifications") if not r["request"])
    assert sum(depth["accepted"] for depth in lossless["depths"]) == lossless["accepted"] == given + 1
