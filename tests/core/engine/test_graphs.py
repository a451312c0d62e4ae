"""Replayed steps: same tokens, same records, and no number of the host's on the tape."""

import time
from collections import Counter

import pytest
import torch

import sfi_core
from sfi_core import AuditConfig, EngineOptions, Sampling, slow_fast
from sfi_core.engine import loop
from sfi_core.engine.graphs import buffers
from sfi_core.engine.graphs.buffers import bucket
from sfi_core.engine.lossless import Drafts
from sfi_core.errors import BackendError, ConfigError
from sfi_core.policies.built_in import codescan
from sfi_core.settings.config import DraftConfig
from sfi_kernels.pack import pack
from tests.core.conftest import tiny_qwen3
from tests.covering import first
from tests.fakes import RecordingObserver
from tests.replays import CONFIG, DELAYED, NEW, PROMPTS, same, told

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors; test_on_a_gpu.py has the real thing")


@pytest.mark.parametrize(("name", "sizes"), first([("qwen3", {0, 1, 2}), ("llama", {1, 2, 3})]))
def test_replayed_steps_are_the_eager_ones(complete, recorder, name, sizes):
    """A ragged batch; requests are slow alone and together: every size of the slow lists is replayed."""
    eager, graphed = complete(False, name), complete(True, name)
    paths = dict(graphed[0].paths)
    same(graphed, eager)
    slow = [len(event.slow) for event in eager[1].begun[1:]]
    assert set(slow) == sizes, "three of four slow requests leave a row of padding"
    needed = Counter(bucket(number, 4) for number in slow)
    assert recorder.tapes == sum(size == 0 or times > 1 for size, times in needed.items())
    assert paths["graph.eager"] == len(needed - Counter({0: NEW})), "the first step of each"


@pytest.mark.parametrize(
    "change",
    first(
        [{"recent_mode": "sliding", "dense_layers": (1,)}, {"sink": 0, "recent": 25, "budget": 60}, {"page_size": 6}]
    ),
    ids=str,
)
def test_every_setting_can_be_replayed(complete, change):
    options = {"config": CONFIG.replace(**change), "max_new_tokens": 7}
    same(complete(True, **options), complete(False, **options))


@pytest.fixture
def runs(monkeypatch):
    runs = []

    class Kept(Drafts):
        def __post_init__(self) -> None:
            Drafts.__post_init__(self)
            runs.append(self.run)

    monkeypatch.setattr(loop, "Drafts", Kept)
    return runs


LOSSLESS = {
    "ragged": {"prompts": [PROMPTS[0], PROMPTS[2]]},
    "sampled, waiting, stopping": {
        "prompts": PROMPTS[1:], "max_batch": 2, "max_new_tokens": 9, "seed": 3, "stop_token_ids": range(0, 96, 13),
        "sampling": Sampling(temperature=1.0, repetition_penalty=1.2),
    },
    "windows": {"name": "gemma-2", "prompts": [PROMPTS[0][:20], PROMPTS[2]], "max_new_tokens": 9},
    "codescan": {"policy": "codescan", "prompts": [PROMPTS[0][:20], PROMPTS[2]], "max_new_tokens": 7, "name": "small"},
    "quest": {"policy": "quest", "prompts": [PROMPTS[0][:20], PROMPTS[2]], "max_new_tokens": 7, "name": "small"},
}  # fmt: skip


@pytest.mark.parametrize("case", first(LOSSLESS, 3))
def test_the_passes_of_a_lossless_run_are_replayed(complete, recorder, monkeypatch, runs, case):
    """Drafts, verifications of several lengths, and both in one pass; rejected tokens are taken back between."""
    draft = DraftConfig(max_tokens=4, adaptive=False)
    config = CONFIG.replace(budget=3, recent=3, draft=draft, baseline={"page": 4})
    monkeypatch.setattr(codescan, "RELEARN", 3)
    options = {"config": config, "policy": "sfi", **LOSSLESS[case]}
    (eager, expected), (graphed, heard) = (complete(graphs, lossless=True, **options) for graphs in (False, True))
    full, _ = complete(False, **{**options, "policy": "full-kv"})
    for report in (eager, graphed):
        assert [r.token_ids for r in report.requests] == [r.token_ids for r in full.requests]
    assert [r.lossless for r in graphed.requests] == [r.lossless for r in eager.requests]
    assert told(heard) == told(expected)
    assert any(r.lossless.accepted < r.lossless.drafted for r in eager.requests)
    assert any(event.slow and event.fast for event in heard.begun[1:])
    replays, once = (graphed.paths.pop(f"graph.{how}") for how in ("replay", "eager"))
    assert replays + once == sum(not event.reads_prompt for event in heard.begun)
    assert replays > once > 0, "a kind of passes is recorded when it comes for the second time"
    assert graphed.paths == eager.paths
    assert recorder.tapes > 1
    theirs, ours = (run.store.keys(min(run.layers), 0, 0, run.requests[0].length - 1) for run in runs)
    torch.testing.assert_close(ours, theirs)


def test_steps_are_launched_before_their_tokens_are_read(complete, recorder):
    """With a delayed trigger every step is foreseen, and launched once; none after the last."""
    options = {"config": DELAYED, "prompts": PROMPTS[1:]}
    eager, graphed = complete(False, **options), complete(True, **options)
    paths = dict(graphed[0].paths)
    same(graphed, eager)
    assert graphed[0].decode_seconds > graphed[0].recording_seconds > eager[0].recording_seconds == 0
    assert paths["graph.ahead"] == paths["graph.replay"] - recorder.tapes, "all but the recorded"
    assert recorder.plays == paths["graph.replay"] == NEW - 1 - paths["graph.eager"]


def test_without_a_delay_the_tokens_decide(complete):
    report, _ = complete(True, prompts=PROMPTS[2:3], max_new_tokens=4)
    assert "graph.ahead" not in report.paths


def test_a_step_that_turns_out_otherwise_is_done_again(complete, recorder, monkeypatch):
    """As if nobody had looked whether the tokens decide: what was launched as fast turns out to be slow."""
    monkeypatch.setattr(buffers, "tokens_decide", lambda _: False)
    config = CONFIG.replace(trigger_token_ids=tuple(range(0, 96, 7)))
    options = {"config": config, "prompts": PROMPTS[1:], "max_new_tokens": 10}
    eager, graphed = complete(False, **options), complete(True, **options)
    assert 0 < graphed[0].paths["graph.ahead"] < 9 - recorder.tapes
    same(graphed, eager)
    assert recorder.plays > 9


def test_a_request_that_stopped_runs_one_step_too_many_and_nobody_notes_it(complete, recorder):
    options = {"config": DELAYED, "prompts": PROMPTS[1:], "max_new_tokens": 9}
    free, _ = complete(False, **options)
    stops = [request.token_ids[at] for request, at in zip(free.requests[:2], (3, 5), strict=True)]
    eager, graphed = (complete(graphs, stop_token_ids=stops, **options) for graphs in (False, True))
    assert graphed[0].paths["graph.ahead"] > 0
    same(graphed, eager)
    assert len({len(request.token_ids) for request in graphed[0].requests}) > 1


def test_sampled_tokens_are_fed_on_as_well(complete):
    options = {
        "config": DELAYED, "prompts": PROMPTS[1:3], "max_new_tokens": 7, "seed": 3,
        "sampling": Sampling(temperature=1.0, repetition_penalty=1.2),
    }  # fmt: skip
    same(complete(True, **options), complete(False, **options))


def test_time_between_steps_counts_where_the_device_has_begun_the_next(complete):
    nap = 0.02
    options = {"config": DELAYED, "prompts": PROMPTS[2:3], "max_new_tokens": 6}
    report, _ = complete(True, on_token=lambda _: time.sleep(nap), **options)
    assert report.decode_seconds >= nap * report.paths["graph.ahead"] > 0


def test_kernels_are_counted_at_each_replay(complete, monkeypatch):
    """Without a request that has nothing to select from, which eager steps treat apart."""
    monkeypatch.delitem(pack.__dict__, "triton")  # no tensors stand for this kernel
    options = {"prompts": PROMPTS[:2], "max_new_tokens": 6}
    (eager, _), (graphed, _) = complete(False, **options), complete(True, **options)
    assert graphed.kernels == eager.kernels
    assert [kernel.name for kernel in graphed.kernels] == ["pack"]


@pytest.mark.exhaustive
def test_the_kernels_themselves_can_be_replayed(monkeypatch, recorder):
    model = tiny_qwen3(layers=1)
    config = CONFIG.replace(trigger_token_ids=(), t_max=1)
    runs = [
        sfi_core.generate(
            model, None, PROMPTS[1:2], config, max_new_tokens=5,
            stop_token_ids=(), engine=EngineOptions(backend="triton", graphs=graphs),
        ).report
        for graphs in (False, True)
    ]  # fmt: skip
    tokens = [[request.token_ids for request in run.requests] for run in runs]
    assert tokens[0] == tokens[1]
    assert runs[1].requests[0].slow_at == [0, 2, 4]
    assert (runs[1].paths["graph.replay"], runs[1].paths["graph.eager"]) == (3, 1)
    assert runs[1].kernels == runs[0].kernels


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policy": "random-k"}, "policy random-k, which selects with more than the evidence"),
        ({"audit": AuditConfig()}, "an audit of every step"),
        (
            {"name": "hybrid", "lossless": True},
            "layers with a state in a lossless run, which padding of drafts would enter",
        ),
        ({"observers": [RecordingObserver()]}, "spans inside the step, as trace.spans=true records"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_replayed_is_refused_with_the_reason(complete, recorder, options, reason):
    options |= {"prompts": PROMPTS[2:3], "max_new_tokens": 2}
    with pytest.raises(ConfigError, match=f"^CUDA graphs must be off with {reason}; use --set engine.graphs=false$"):
        complete(True, **options)
    report, _ = complete(None, **options)
    assert report.paths["graph.eager"] == 1
    assert f"must be off with {reason};" in report.not_replayed
    assert recorder.tapes == 0


def test_graphs_on_a_cpu_are_refused(models):
    options = {"max_new_tokens": 2, "stop_token_ids": ()}
    with pytest.raises(BackendError, match=r"^CUDA graphs need a CUDA device, got cpu; use --set engine.graphs=false$"):
        sfi_core.generate(models["qwen3"], None, PROMPTS[2:3], CONFIG, engine=EngineOptions(graphs=True), **options)
    report = sfi_core.generate(models["qwen3"], None, PROMPTS[2:3], CONFIG, **options).report
    assert not any(name.startswith("graph") for name in report.paths)


def test_another_backend_cannot_replay(models, recorder):
    model, said = models["qwen3"], r"^CUDA graphs need the triton backend, got torch"
    with pytest.raises(BackendError, match=said):
        sfi_core.generate(model, None, PROMPTS[2:3], CONFIG, engine=EngineOptions(graphs=True))
    with slow_fast(model, None, CONFIG, engine=EngineOptions(graphs=True)), pytest.raises(BackendError, match=said):
        model.generate(torch.tensor(PROMPTS[2:3]), max_new_tokens=3)
