"""Decoding steps of `model.generate` and of other loops are replayed as graphs, and give what eager steps give."""

import pytest
import torch
from transformers import TextIteratorStreamer

from sfi_core import AuditConfig, EngineOptions, slow_fast
from sfi_core.engine.loop import left_pad
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers import session
from sfi_core.hosts.transformers.cache import CACHE_NAME
from tests.architectures import prompts, tiny
from tests.core.hosts.test_session import Numbers, StopAfter
from tests.covering import first
from tests.fake_graph import FakeRecorder, use_tensors
from tests.fakes import Listener
from tests.replays import CONFIG, told

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors; test_on_a_gpu.py has the real thing")
IDS, MASK = left_pad(prompts(40, 21), torch.device("cpu"))
NEW = 14


@pytest.fixture
def recorder(monkeypatch) -> FakeRecorder:
    use_tensors(monkeypatch)
    recorder = FakeRecorder()
    recorder.install(monkeypatch)
    return recorder


def under(graphs: bool | None, decode, label: str = "llama", **options) -> tuple:
    """Return what a loop, called with the model and the session, gives with or without graphs, and all that it told."""
    model, observer = tiny(label), Listener()
    engine, config = EngineOptions(backend="triton", graphs=graphs), options.pop("config", CONFIG)
    with slow_fast(model, None, config, engine=engine, page_size=16, observers=[observer], **options) as run:
        torch.manual_seed(5)
        with torch.no_grad():
            outputs = decode(model, run)
        return outputs, run.report, told(observer)


def same(decode, *, replays: bool = True, **options) -> dict:
    """Compare a loop with graphs and without; return the paths with them."""
    (mine, report, heard), (theirs, eager, expected) = (under(graphs, decode, **options) for graphs in (None, False))
    assert all(torch.equal(ours, other) for ours, other in zip(mine, theirs, strict=True))
    assert heard == expected
    assert (report.paths.get("graph.replay", 0) > 0) == replays, report.not_replayed
    assert "graph.eager" not in eager.paths
    for ours, other in zip(report.requests, eager.requests, strict=True):
        assert (ours.token_ids, ours.slow_at) == (other.token_ids, other.slow_at)
        assert ours.cache_read_ratio == other.cache_read_ratio
    others = {name: count for name, count in report.paths.items() if not name.startswith("graph")}
    assert others == eager.paths
    return report.paths | {"not_replayed": report.not_replayed}


def calls(*several: dict):
    """Return a loop of calls of `model.generate`."""

    def decode(model, _) -> list:
        given = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": NEW, "do_sample": False}
        return [model.generate(**given | call) for call in several]

    return decode


def own_loop(steps: int, ids=IDS[:1], **asked):
    """Return a loop of one's own that keeps all logits, and asks for more than those at every fifth step."""

    def decode(model, run) -> list:
        cache, token, outputs = run.cache(), ids, []
        for step in range(steps):
            more = asked if step % 5 == 3 else {}
            outputs.append(model(input_ids=token, **more, **{CACHE_NAME: cache}).logits)
            token = outputs[-1][:, -1:].argmax(-1)
        return outputs

    return decode


@pytest.mark.parametrize("policy", first(["sfi", "full-kv", "snapkv"], 2))
def test_generate_gives_an_eager_step_s_tokens(recorder, policy: str):
    """Of a ragged batch: greedy, drawn, with a row that ends first, other processors, and several answers each."""
    plain = tiny("llama").generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False)
    ends = {"eos_token_id": int(plain[0, IDS.shape[1] + 4]), "pad_token_id": 0}
    drawn = {"do_sample": True, "num_return_sequences": 2}
    given = {"repetition_penalty": 1.3, "tokenizer": Numbers()}  # as stop strings need one, it reaches the model
    several = calls({}, drawn, ends, {"stopping_criteria": [StopAfter(IDS.shape[1] + 7)]}, given)
    paths = same(several, policy=policy)
    assert paths["not_replayed"] == ""
    assert recorder.plays > paths["graph.replay"], "in all calls; the report is of the last"
    if policy == "full-kv":
        assert torch.equal(under(None, calls({}), policy=policy)[0][0], plain)


def test_a_streamer_hears_every_token(recorder):
    streamer = TextIteratorStreamer(Numbers(), skip_prompt=True)
    (output,), report, _ = under(None, calls({"input_ids": IDS[:1], "attention_mask": None, "streamer": streamer}))
    assert "".join(streamer).split() == [str(token) for token in output[0, IDS.shape[1] :].tolist()]
    assert report.paths["graph.replay"] == recorder.plays > 0


@pytest.mark.parametrize("policy", first(["sfi", "codescan"], 1))
def test_a_cache_that_grows_is_recorded_anew(recorder, monkeypatch, policy: str):
    """Its pages move; the logits that a loop has kept stay as they were."""
    monkeypatch.setattr(session, "UNKNOWN_CAPACITY", 4)
    monkeypatch.setattr("sfi_core.state.kv_cache.GROWTH", 0)
    paths = same(own_loop(NEW), policy=policy, config=CONFIG.replace(budget=3, recent=4))
    assert recorder.tapes > 1
    assert paths["not_replayed"] == ""


def test_a_call_for_more_than_logits_is_the_model_s(recorder):
    paths = same(own_loop(NEW, output_hidden_states=True))
    assert paths["not_replayed"] == "a call of the model with output_hidden_states"
    assert paths["graph.replay"] == recorder.plays
    assert paths["graph.replay"] + paths["graph.eager"] == NEW - 1


def test_positions_are_the_caller_s(recorder):
    """Others than the cache's, one for all rows."""

    def decode(model, run) -> list:
        cache, outputs = run.cache(), []
        outputs.append(model(input_ids=IDS, attention_mask=MASK, **{CACHE_NAME: cache}).logits[:, -1])
        for step in range(4):
            position = torch.tensor([[IDS.shape[1] + 9 * step]])
            outputs.append(model(input_ids=IDS[:, :1], position_ids=position, **{CACHE_NAME: cache}).logits)
        return outputs

    assert same(decode, policy="full-kv")["graph.replay"] == 4


@pytest.mark.parametrize("label", ["llama", "granite-4"])
def test_audited_steps_are_the_model_s(recorder, label: str):
    paths = same(calls({}), audit=AuditConfig(every=4, top=4), label=label)
    assert paths["graph.replay"] > 1 < paths["graph.eager"]


def test_hooks_in_the_model_keep_it_eager(recorder):
    """A replay does not call them; a hook of transformers for hidden states, which stays, does not count."""
    model = tiny("llama")
    hook = model.model.norm.register_forward_hook(lambda *_: None)
    try:
        same(calls({}), replays=False)
        said = "^CUDA graphs must be off with forward hooks in the model, which a replay does not call"
        with pytest.raises(ConfigError, match=said):
            under(True, calls({}))
    finally:
        hook.remove()
