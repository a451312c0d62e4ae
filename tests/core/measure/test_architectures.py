"""Models without a checkpoint: their sizes, against the project's performance notes, and random weights."""

import copy
from functools import cache

import pytest
import torch

from sfi_core import SfiConfig, slow_fast
from sfi_core.errors import InputError, UnsupportedModelError
from sfi_core.hosts.transformers.shapes import layer_shapes
from sfi_core.measure.bench.architectures import empty_model, random_config, random_model
from sfi_core.models.describe import ModelWeights
from tests.architectures import WORKS, tiny

META, CPU = torch.device("meta"), torch.device("cpu")
# layers, KV heads, billions of weights, GB of them, KV bytes a token: T1
T1 = {
    "qwen3-0.6b": (28, 8, 0.60, 1.19, 114_688),
    "qwen3-4b": (36, 8, 4.02, 8.04, 147_456),
    "qwen3-8b": (36, 8, 8.19, 16.38, 147_456),
    "qwen3-30b-a3b": (48, 4, 30.53, 61.06, 98_304),
    "llama-3.1-8b": (32, 8, 8.03, 16.06, 131_072),  # FreeKV's two models, by their model cards
    "qwen2.5-7b": (28, 4, 7.62, 15.23, 57_344),
}
T2 = {  # GB of weights that a step reads at batch 1, 4, 16, 32
    "qwen3-0.6b": (1.19, 1.19, 1.19, 1.19),
    "qwen3-4b": (8.04, 8.04, 8.04, 8.04),
    "qwen3-8b": (15.14, 15.14, 15.14, 15.14),
    "qwen3-30b-a3b": (6.08, 15.65, 39.80, 53.09),
}
shapes_once = cache(layer_shapes)


@cache
def meta(name):
    return empty_model(random_config(name), META, torch.bfloat16)


@pytest.mark.parametrize("name", T1)
def test_named_architectures_are_those_of_the_notes(name):
    layers, heads, billions, total, row = T1[name]
    shapes = shapes_once(meta(name))
    weights = ModelWeights.of(meta(name))
    assert (len(shapes), shapes[0].heads) == (layers, heads)
    assert weights.total_bytes / 2e9 == pytest.approx(billions, abs=0.006)
    assert weights.total_bytes / 1e9 == pytest.approx(total, abs=0.006)
    assert sum(shape.row_bytes for shape in shapes) == row


@pytest.mark.parametrize("name", T2)
def test_weights_that_a_step_reads_grow_with_the_batch_of_a_mixture_only(name):
    weights = ModelWeights.of(meta(name))
    for batch, expected in zip((1, 4, 16, 32), T2[name], strict=True):
        assert weights.read(batch) / 1e9 == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("label", [works.label for works in WORKS])
def test_shapes_without_weights_are_those_of_a_run(label):
    model = tiny(label)
    empty = empty_model(copy.deepcopy(model.config), META, torch.float32)
    if label in ("gpt-2", "opt"):  # they look at their input for padding
        with pytest.raises(UnsupportedModelError, match="its forward pass depends on data"):
            layer_shapes(empty)
        return
    with slow_fast(model, None, SfiConfig(trigger_policy="never")) as session:
        assert layer_shapes(empty) == session.shapes()


@pytest.mark.parametrize("label", ["qwen3", "gpt-oss", "deepseek-v3", "gemma-2", "gpt-neox"])
def test_random_weights_of_any_architecture_give_finite_logits(label, tmp_path):
    tiny(label).config.to_json_file(tmp_path / "config.json")
    config = random_config(str(tmp_path / "config.json"))
    model = random_model(config, CPU, torch.bfloat16, seed=3)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        logits = model(input_ids=torch.arange(2, 40)[None]).logits.float()
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert not any(weight.isnan().any() for weight in model.parameters())


def test_random_weights_are_the_seeds_and_share_what_is_tied(tmp_path):
    tiny("qwen3").config.to_json_file(tmp_path / "config.json")
    config = random_config(str(tmp_path / "config.json"))
    config.tie_word_embeddings = True
    one, same, other = (random_model(config, CPU, torch.float32, seed) for seed in (1, 1, 2))
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert all(map(torch.equal, one.parameters(), same.parameters()))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    matrix = one.model.layers[0].mlp.up_proj.weight.detach()
    assert matrix.abs().max() <= 0.035
    assert matrix.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(matrix[0], matrix[1])
    assert torch.equal(one.model.norm.weight, torch.ones_like(one.model.norm.weight))


def test_a_config_that_is_none_is_refused(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match=r"config of .*bad\.json cannot be read"):
        random_config(str(tmp_path / "bad.json"))
    with pytest.raises(InputError, match=r"random weights must be one of .* got 'qwen3-5b'"):
        random_config("qwen3-5b")
