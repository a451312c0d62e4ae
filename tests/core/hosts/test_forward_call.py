"""Decoding steps of `model.generate` and of other loops are compiled on a CPU, and give what eager steps give."""

import pytest
import torch

from sfi_core import AuditConfig, EngineOptions, slow_fast
from sfi_core.engine.loop import left_pad
from sfi_core.hosts.transformers.cache import CACHE_NAME
from tests.architectures import SMALL, prompts, tiny
from tests.core.hosts.test_session import StopAfter
from tests.covering import first

pytest.importorskip("numba")
IDS, MASK = left_pad(prompts(60, 21), torch.device("cpu"))
EAGER = EngineOptions(graphs=False)


def answers(label: str, engine: EngineOptions | None, calls: list[dict], **options) -> tuple:
    model, outputs = tiny(label), []
    with slow_fast(model, None, SMALL, engine=engine, **options) as run:
        for call in calls:
            torch.manual_seed(5)
            given = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 24, "do_sample": False, **call}
            outputs.append(model.generate(**given))
    return outputs, run.report


@pytest.mark.parametrize("policy", first(["full-kv", "sfi", "codescan", "quest"], 2))
@pytest.mark.parametrize("label", first(["qwen3", "llama"]))
def test_generate_gives_an_eager_step_s_tokens(label: str, policy: str):
    plain = tiny(label).generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=24, do_sample=False)
    calls = [
        {}, {"do_sample": True}, {"eos_token_id": int(plain[0, IDS.shape[1] + 4])},  # a row that ends first
        {"stopping_criteria": [StopAfter(IDS.shape[1] + 7)]}, {"repetition_penalty": 1.3},
    ]  # fmt: skip
    (mine, report), (theirs, eager) = (answers(label, engine, calls, policy=policy) for engine in (None, EAGER))
    assert report.paths["step.compiled"]
    assert "step.compiled" not in eager.paths
    assert all(torch.equal(ours, other) for ours, other in zip(mine, theirs, strict=True))
    for ours, other in zip(report.requests, eager.requests, strict=True):
        assert (ours.token_ids, ours.slow_at) == (other.token_ids, other.slow_at)
        assert ours.cache_read_ratio == other.cache_read_ratio
    if policy == "full-kv":
        assert torch.equal(mine[0], plain)


@pytest.mark.parametrize("label", ["llama", "gemma-3"])  # full attention; windows in buffers of compiled steps
def test_a_loop_of_one_s_own_may_ask_for_more_than_logits(label: str):
    texts = []
    for engine in (None, EAGER):
        model, ids = tiny(label), IDS[:1]
        with slow_fast(model, None, SMALL, policy="full-kv", engine=engine) as run, torch.no_grad():
            run.shapes()
            cache, tokens = run.cache(), []
            for step in range(20):
                output = model(input_ids=ids, output_hidden_states=step % 5 == 3, **{CACHE_NAME: cache})
                ids = output.logits[:, -1:].argmax(-1)
                tokens.append(int(ids))
                assert (output.hidden_states is not None) == (step % 5 == 3)
            assert ("step.compiled" in run.report.paths) == (engine is None)
        texts.append(tokens)
    assert texts[0] == texts[1]


def test_two_caches_in_turns_have_their_own_runs():
    texts = []
    for engine in (None, EAGER):
        model, tokens = tiny("llama"), []
        with slow_fast(model, None, SMALL, engine=engine) as run, torch.no_grad():
            run.shapes()
            caches, ids = [run.cache(), run.cache()], [IDS[:1], IDS[:1].flip(1)]
            for step in range(16):
                row = step % 2
                ids[row] = model(input_ids=ids[row], **{CACHE_NAME: caches[row]}).logits[:, -1:].argmax(-1)
                tokens.append(int(ids[row]))
        texts.append(tokens)
    assert texts[0] == texts[1]


def test_audited_steps_are_the_model_s():
    audit = {"audit": AuditConfig(every=4, top=4)}
    (mine, report), (theirs, _) = (answers("llama", engine, [{}], **audit) for engine in (None, EAGER))
    assert torch.equal(*mine, *theirs)
    assert report.paths["step.compiled"] > 1 < report.paths["step.eager"]


def test_positions_that_are_not_the_cache_s_go_to_the_model():
    model = tiny("llama")
    logits = []
    for engine in (None, EAGER):
        with slow_fast(model, None, SMALL, policy="full-kv", engine=engine) as run, torch.no_grad():
            run.shapes()
            cache = run.cache()
            model(input_ids=IDS[:1], **{CACHE_NAME: cache})
            position = torch.tensor([[IDS.shape[1] + 9]])
            logits.append(model(input_ids=IDS[:1, :1], position_ids=position, **{CACHE_NAME: cache}).logits)
            assert "step.compiled" not in run.report.paths
    assert torch.equal(*logits)


def test_the_model_is_as_it_was_afterwards():
    model = tiny("llama")
    with slow_fast(model, None, SMALL):
        assert {"generate", "forward"} <= model.__dict__.keys()
    assert not {"generate", "forward"} & model.__dict__.keys()
