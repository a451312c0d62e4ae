"""Replayed steps: same tokens, same records, and no number of the host's on the tape."""

import re
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

import sfi_core
from sfi_core import AuditConfig, EngineOptions, Sampling, SfiConfig, slow_fast
from sfi_core.engine import loop
from sfi_core.engine.attend import prepare_layers
from sfi_core.engine.graphs import buffers, steps
from sfi_core.engine.graphs.buffers import bucket
from sfi_core.engine.lossless import Drafts
from sfi_core.engine.picking import Picker
from sfi_core.errors import BackendError, ConfigError
from sfi_core.policies import POLICIES, Evidence, EvidencePolicy, Selection, Triggered, best
from sfi_core.policies.built_in import codescan
from sfi_core.settings.config import DraftConfig
from sfi_kernels.pack import pack
from tests.architectures import SMALL, prompts, tiny
from tests.core.conftest import TINY, tiny_qwen3
from tests.covering import first
from tests.fake_graph import LOOKS, FakeRecorder, Tape, use_tensors
from tests.fakes import Listener, RecordingObserver, positions
from tests.tiny_models import build

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors; test_on_a_gpu.py has the real thing")
PROMPTS = [list(range(5, 45)), list(range(3, 28)), list(range(50, 57)), list(range(9, 50))]
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=8, budget=6, t_max=4, window_prefill=4,
    trigger_token_ids=tuple(range(0, 96, 3)), trigger_delay=0,
)  # fmt: skip
NEW = 12


@pytest.fixture(scope="module")
def models() -> dict:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=96, initializer_range=0.3, **TINY)).eval()
    hybrid, gemma = tiny("granite-4"), tiny("gemma-2")
    return {"qwen3": tiny_qwen3(), "llama": llama, "small": tiny_qwen3(layers=1), "gemma-2": gemma, "hybrid": hybrid}


@pytest.fixture
def recorder(monkeypatch) -> FakeRecorder:
    made = FakeRecorder()
    made.install(monkeypatch)
    return made


@pytest.fixture
def complete(monkeypatch, models, recorder):
    """Run with or without graphs; return all that the run said."""
    use_tensors(monkeypatch)

    def run(graphs: bool | None, name: str = "qwen3", **options) -> tuple:
        observer = Listener()
        options = {"config": CONFIG, "max_new_tokens": NEW, "stop_token_ids": (), "prompts": PROMPTS, **options}
        result = sfi_core.generate(
            models[name], None, options.pop("prompts"), page_size=16,
            observers=[observer, *options.pop("observers", [])],
            engine=EngineOptions(
                backend="triton", graphs=graphs, lossless=options.pop("lossless", False), kv_page=16,
                kv_device_budget=options.pop("tiers", None),
            ), **options,
        )  # fmt: skip
        return result.report, observer

    return run


def told(observer: Listener) -> tuple:
    """Return what the observer heard, without the padding of positions, diagnostics and times."""
    chosen = {
        (e.step, e.layer, e.request, e.reason): (
            positions(e.index_HK),
            None if e.heads_H is None else e.heads_H.tolist(),
        )
        for e in observer.selections
    }
    steps = [
        (e.step, e.request, e.position, e.token_id, e.reason, e.attended_tokens, e.context_tokens)
        for e in observer.steps
    ]
    return steps, [(e.step, e.slow, e.fast) for e in observer.begun], chosen


def same(graphed: tuple, eager: tuple) -> None:
    (report, heard), (wanted, expected) = graphed, eager
    assert [r.token_ids for r in report.requests] == [r.token_ids for r in wanted.requests]
    assert told(heard) == told(expected)
    for ours, theirs in zip(heard.selections, expected.selections, strict=True):
        assert ours.diagnostics.keys() == theirs.diagnostics.keys()
        for name, value in theirs.diagnostics.items():
            torch.testing.assert_close(ours.diagnostics[name], value, rtol=1e-4, atol=1e-6)
    replays, once = (report.paths.pop(f"graph.{how}", 0) for how in ("replay", "eager"))
    report.paths.pop("graph.ahead", None)
    assert replays > 0
    assert replays + once == sum(not event.reads_prompt for event in heard.begun)
    assert report.paths == wanted.paths
    assert report.not_replayed == ""


class Loudest(EvidencePolicy, Triggered):
    def select_after(self, context: Evidence) -> Selection:
        return best(context, context.probability().amax(dim=(2, 3)), self.config.budget)


def test_a_policy_sees_its_request_s_tokens_and_none_behind_them(complete, monkeypatch):
    """The logits there are undefined: others' are longer, and a recorded step has room for all to come."""
    monkeypatch.setitem(POLICIES, "loudest", Loudest)
    options = {"policy": "loudest", "max_new_tokens": 7}
    (_, among), (_, alone) = (
        complete(how, prompts=some, **options) for how, some in ((True, PROMPTS[:2]), (False, PROMPTS[1:2]))
    )
    kept = {key[:2]: heads for key, heads in told(among)[2].items() if key[2] == 1}
    assert kept == {key[:2]: heads for key, heads in told(alone)[2].items()}
    assert len(kept) > 2  # there is a slow step after the prompt's


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


@pytest.mark.parametrize("policy", ["full-kv", "streaming-llm", "snapkv", "prior-only"])
def test_other_policies_can_be_replayed(complete, recorder, policy):
    options = {"policy": policy, "max_new_tokens": 6, "prompts": PROMPTS[1:3]}
    same(complete(True, **options), complete(False, **options))
    assert recorder.tapes == {"prior-only": 2}.get(policy, 1)


@pytest.mark.parametrize(
    "policy", first(["sfi", "freekv", "snapkv", "streaming-llm", "codescan", "quest", "synckv"], 3)
)
def test_steps_over_two_tiers_can_be_replayed(complete, recorder, policy):
    """Tokens and records are those of eager steps and of a cache on the device; so are the bytes over the link."""
    prompts = [[7 * token % 96 for token in range(length)] for length in (150, 90)]
    options = {
        "policy": policy, "config": EVERY_STEP.replace(recent=16, budget=4), "max_new_tokens": 8, "prompts": prompts
    }  # fmt: skip
    if policy in ("codescan", "freekv", "quest"):
        options |= {"name": "small", "prompts": PROMPTS[:2]}
    tiers = "70kB" if policy in ("sfi", "snapkv", "streaming-llm") else "1MB"  # without room for a layer
    graphed, eager = (complete(graphs, tiers=tiers, **options) for graphs in (True, False))
    whole = complete(False, **options)
    tapes, recalls = (
        recorder.tapes,
        [
            [(e.step, e.request, e.layer, e.rows_H.tolist(), e.row_bytes) for e in heard.recalls]
            for _, heard in (graphed, eager)
        ],
    )
    assert sorted(recalls[0]) == sorted(recalls[1])
    same(graphed, eager)
    assert [r.token_ids for r in graphed[0].requests] == [r.token_ids for r in whole[0].requests]
    assert told(graphed[1]) == told(whole[1])
    ours, theirs = (replace(report.kv_tiers, recall_seconds=0) for report, _ in (graphed, eager))
    assert ours == theirs
    assert (ours.recalled_bytes > 0) == (policy not in ("snapkv", "streaming-llm"))
    assert tapes > 0


@pytest.mark.exhaustive
def test_the_choice_of_a_step_can_be_replayed(complete, recorder, monkeypatch):
    """With the kernels that choose. Before the third replay, and without waiting for the device, the second
    prompt learns its first basis; the first one learns its own again before the fourth."""
    learned = []

    def learn(run, *about) -> None:
        with recorder.refusing(Tape(host=True)) as tape:
            prepare_layers(run, *about)
        if tape.played:
            learned.append((sorted(run.kept), recorder.plays))

    monkeypatch.setattr(steps, "prepare_layers", learn)
    monkeypatch.setattr(codescan, "RELEARN", 3)
    options = {"policy": "codescan", "max_new_tokens": 6, "prompts": [PROMPTS[0], PROMPTS[2][:5]], "name": "small"}
    config = CONFIG.replace(budget=2, recent=3)
    eager, graphed = (complete(one, config=config, **options) for one in (False, True))
    assert graphed[0].paths["graph.replay"] == 5
    same(graphed, eager)
    assert recorder.tapes == 1
    assert learned == [([0], plays) for plays in (2, 3)]


OWN_WINDOWS = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}


@pytest.mark.parametrize("label", first(["gemma-2", "llama-4", "gpt-oss", "gemma-4", "gemma-3", *OWN_WINDOWS], 4))
def test_windows_and_chunks_are_replayed(complete, models, label):
    """Soft caps, chunks, learned sinks, shared keys. A window of 12 tokens, whose edge two requests cross while they
    decode: the second from its start, the third where it joins the batch."""
    model = models[label] = build(label, **OWN_WINDOWS[label]) if label in OWN_WINDOWS else tiny(label)
    rows, config = prompts(37, 5, 9), SMALL.replace(budget=1000)
    options = {"name": label, "prompts": rows, "config": config, "max_new_tokens": 16, "max_batch": 2}
    (eager, expected), (graphed, heard) = complete(False, **options), complete(True, **options)
    whole = [model.generate(torch.tensor([row]), max_new_tokens=16, do_sample=False)[0, len(row) :] for row in rows]
    assert [r.token_ids for r in graphed.requests] == [row.tolist() for row in whole]
    assert graphed.requests == eager.requests
    assert told(heard) == told(expected)
    assert graphed.paths.pop("graph.replay") > 9 * graphed.paths.pop("graph.eager")
    graphed.paths.pop("graph.ahead", None)
    assert graphed.paths == eager.paths


EVERY_STEP = CONFIG.replace(
    trigger_delay=1, baseline={"page": 4}, freekv={"page": 4, "tau": 0.1, "first_layer_dense": False},
    synckv={"heads": "even", "stride": 3},
)  # fmt: skip
BATCHES = {
    "one": {"prompts": PROMPTS[2:3], "max_new_tokens": 8},
    "joining": {"prompts": PROMPTS[1:], "max_batch": 2, "max_new_tokens": [3, 6, 3]},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("policy", ["quest", "freekv", "synckv", "oracle-top-k"])
def test_policies_that_choose_at_every_step_can_be_replayed(complete, recorder, policy, batch):
    """With the kernels that score and choose pages. Where a request joins, a step that was launched is done again."""
    options = {"config": EVERY_STEP, "policy": policy, "name": "small", **BATCHES[batch]}
    eager, graphed = complete(False, **options), complete(True, **options)
    ahead = graphed[0].paths.get("graph.ahead", 0)
    same(graphed, eager)
    assert ahead > 0
    assert recorder.plays > ahead
    corrected = [e.heads_H for e in eager[1].selections if e.reason == "correction"]
    assert not corrected or 0 < int(torch.stack(corrected).sum()) < torch.stack(corrected).numel()
    assert bool(corrected) is (policy == "freekv")
    assert recorder.tapes == 1 + (policy == "synckv" and batch == "one")  # slow steps, where they come twice


@pytest.fixture
def runs(monkeypatch):
    found = []

    class Kept(Drafts):
        def __post_init__(self) -> None:
            Drafts.__post_init__(self)
            found.append(self.run)

    monkeypatch.setattr(loop, "Drafts", Kept)
    return found


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
    (eager, expected), (graphed, heard) = (complete(one, lossless=True, **options) for one in (False, True))
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


DRAFTED = CONFIG.replace(draft=DraftConfig(max_tokens=5, adaptive=False), baseline={"page": 4}, t_max=9)
T_MAX, ENDS = (DRAFTED.replace(trigger_policy=policy, trigger_delay=1) for policy in ("t-max", "boundary"))
PAIR = {"prompts": [PROMPTS[0][:20], PROMPTS[2]], "stop_token_ids": range(1, 96, 9), "max_new_tokens": 9}
CHAINED = {
    "sampled, waiting": {
        "config": T_MAX, "policy": "sfi", "prompts": PROMPTS[1:], "max_batch": 2, "max_new_tokens": 20, "seed": 3,
        "stop_token_ids": range(0, 96, 13),
        "sampling": [Sampling(temperature=1.0), Sampling(), Sampling(temperature=2.0)],
    },
    "a sentence end decides": {
        "config": ENDS.replace(trigger_token_ids=tuple(range(0, 96, 9))), "policy": "sfi", "prompts": PROMPTS[1:],
        "stop_token_ids": range(5, 96, 11), "max_new_tokens": 24,
    },
    "codescan": {"config": ENDS, "policy": "codescan", "name": "small", **PAIR},
    "quest": {"config": ENDS, "policy": "quest", "name": "small", **PAIR},
}  # fmt: skip


@pytest.mark.parametrize("case", first(CHAINED, 2))
def test_a_draft_is_read_when_it_is_verified(complete, monkeypatch, case):
    """Not before, but one step late where a sentence end decides. What is drafted behind a stop token never was."""
    drafting, looks, behind, drawn = False, 0, list[int](), []

    def plan(drafts, plan=Drafts.plan) -> list:
        nonlocal drafting
        blocks = plan(drafts)
        drafting = not any(block and block.reason for block in blocks)
        return blocks

    def draw(picker, *about, draw=Picker.draw):
        drawn.append(draw(picker, *about))
        return drawn[-1]

    def read(picker, picks, read=Picker.read) -> list[int]:
        if drafting and picks in drawn:
            behind.append(len(drawn) - 1 - drawn.index(picks))
        return read(picker, picks)

    def watched(look):
        def watch(tensor, *more):
            nonlocal looks
            looks += drafting
            return look(tensor, *more)

        return watch

    for owner, method in ((Drafts, plan), (Picker, draw), (Picker, read)):
        monkeypatch.setattr(owner, method.__name__, method)
    eager, expected = complete(False, lossless=True, **CHAINED[case])
    behind.clear()
    for look in (*LOOKS, "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, look, watched(getattr(torch.Tensor, look)))
    graphed, heard = complete(True, lossless=True, **CHAINED[case])
    assert looks == len(behind)
    assert set(behind) == ({1} if case == "a sentence end decides" else set())
    assert len(heard.begun) > len(expected.begun), "something was drafted behind a stop token"
    for name in ("token_ids", "lossless", "reasons"):
        assert [getattr(r, name) for r in graphed.requests] == [getattr(r, name) for r in eager.requests]
    (steps_of, _, chosen), (wanted, _, selected) = told(heard), told(expected)
    assert sorted(steps_of, key=lambda step: step[1]) == sorted(wanted, key=lambda step: step[1])
    assert chosen == selected


DELAYED = CONFIG.replace(trigger_delay=1)
STATED = ["granite-4", "qwen3-next", "jamba", "lfm2-moe"]


@pytest.mark.parametrize("label", first(STATED, 2))
def test_recording_a_step_advances_no_state(complete, models, recorder, label):
    """Nor does an audited step between; when a request ends, another joins, which steps launched ahead do not know."""
    models[label] = tiny(label)
    options = {"config": DELAYED, "prompts": prompts(30, 30, 30), "name": label, "max_new_tokens": 8}
    ends = complete(False, **options)[0].requests[0].token_ids[2]  # before a fast step
    for more in ({"max_batch": 2, "stop_token_ids": [ends]}, {"audit": AuditConfig(every=3, top=4)}):
        eager, graphed = (complete(how, **options, **more) for how in (False, None))
        assert [r.token_ids for r in graphed[0].requests] == [r.token_ids for r in eager[0].requests]
        assert told(graphed[1]) == told(eager[1])
        assert graphed[0].paths["graph.replay"] > 1
    together = complete(True, **options)
    assert together[0].paths["graph.ahead"] > 0
    same(together, complete(False, **options))


def test_states_that_move_keep_a_model_eager(complete, recorder, monkeypatch):
    forward = GraniteMoeHybridMambaLayer.forward

    def assign(mixer, *args, cache_params, **options) -> torch.Tensor:
        out, layer = forward(mixer, *args, cache_params=cache_params, **options), cache_params.layers[mixer.layer_idx]
        layer.recurrent_states[0] = layer.recurrent_states[0].clone()
        return out

    options = {"prompts": prompts(30), "name": "hybrid", "max_new_tokens": 5}
    expected = complete(False, **options)
    monkeypatch.setattr(GraniteMoeHybridMambaLayer, "forward", assign)
    report, heard = complete(None, **options)
    assert re.search(r"but GraniteMoeHybridMambaLayer of layer \d assigns new state tensors", report.not_replayed)
    assert report.paths["graph.eager"] == 4
    assert told(heard) == told(expected[1])
    with pytest.raises(BackendError, match="assigns new state tensors"):
        complete(True, **options)


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
    eager, graphed = (complete(one, stop_token_ids=stops, **options) for one in (False, True))
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


@pytest.mark.parametrize("look", first(["item", "tensor"]))
def test_a_model_that_waits_for_the_device_runs_eagerly(complete, models, recorder, look):
    """Its logits are those of every step; asked for graphs, it is refused instead."""
    looks = {"item": lambda x: x.sum().item(), "tensor": lambda x: x + torch.tensor([1.0])}
    hook = models["qwen3"].model.norm.register_forward_pre_hook(lambda _, args: (looks[look](args[0]), None)[1])
    try:
        options = {"prompts": PROMPTS[1:3], "max_new_tokens": 4}
        (eager, heard), (graphed, listened) = complete(False, **options), complete(None, **options)
        assert told(listened) == told(heard)
        assert graphed.paths == eager.paths | {"graph.eager": 3}
        assert re.search("waits for the device|values from the host", graphed.not_replayed)
        assert eager.not_replayed == ""
        assert recorder.tapes == 0
        with pytest.raises(BackendError, match=r"waits for the device|values from the host"):
            complete(True, **options)
    finally:
        hook.remove()


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
