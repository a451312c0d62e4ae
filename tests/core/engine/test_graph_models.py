"""Replayed steps of models with windows, chunks and states, and of models that cannot be recorded."""

import re

import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

from sfi_core import AuditConfig
from sfi_core.errors import BackendError
from tests.architectures import SMALL, prompts, tiny
from tests.covering import first
from tests.replays import DELAYED, PROMPTS, same, told
from tests.tiny_models import build

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors; test_on_a_gpu.py has the real thing")


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
