"""How long a text may be under scaled RoPE, and that texts of that length run."""

import pytest
import torch

from sfi_core import generate, slow_fast
from sfi_core.errors import InputError
from sfi_core.models.rotation import most_positions
from tests.architectures import SMALL
from tests.fakes import tokens
from tests.tiny_models import ALTERNATE, build

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
KINDS = {
    "yarn": ("qwen3", 32, YARN, 128),
    "yarn whose config has the extended length": ("qwen3", 128, YARN, 128),
    "yarn without an original length": ("qwen3", 64, {"rope_type": "yarn", "factor": 2.0}, 128),
    "linear": ("llama", 32, LINEAR, 128),
    "dynamic": ("llama", 32, DYNAMIC, 128),
    "llama3": ("llama", 128, {"rope_type": "llama3", "factor": 4.0, **LLAMA3}, 128),
    "longrope": ("phi3", 128, {"rope_type": "longrope", **LONG}, 128),
    "by kind of layer": ("olmo3", 32, {"sliding_attention": PLAIN, "full_attention": {**PLAIN, **YARN}}, 128),
    "Gemma 3": ("gemma3_text", 128, {"sliding_attention": PLAIN, "full_attention": {**PLAIN, **LINEAR}}, 128),
    "none": ("qwen3", 128, PLAIN, 128),
}  # fmt: skip


@pytest.mark.seam
@pytest.mark.parametrize(("model_type", "stated", "rope", "limit"), KINDS.values(), ids=KINDS)
def test_text_of_as_many_positions_as_scaled_rope_has_runs_as_in_transformers(model_type, stated, rope, limit):
    kinds = {"layer_types": ALTERNATE} if "full_attention" in rope else {}
    rope = {kind: dict(own) for kind, own in rope.items()} if kinds else {"rope_theta": 1e4, **rope}
    model = build(model_type, max_position_embeddings=stated, rope_parameters=rope, **kinds)
    assert most_positions(model.config) == limit
    prompt = torch.arange(3, 3 + limit - 6)[None]
    alone = model.generate(prompt, max_new_tokens=6)[:, limit - 6 :].tolist()
    with slow_fast(model, None, SMALL, policy="full-kv"):
        assert model.generate(prompt, max_new_tokens=6)[:, limit - 6 :].tolist() == alone
    assert tokens(generate(model, None, prompt.tolist(), SMALL, policy="full-kv", max_new_tokens=6)) == alone
    with pytest.raises(InputError, match=f"7 new tokens must fit the model's {limit} positions"):
        generate(model, None, prompt.tolist(), SMALL, max_new_tokens=7)
