"""A cache full of random keys stands in for a long prompt."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sfi_core import SfiConfig, slow_fast
from sfi_core.synthetic import synthetic_cache


def test_decoding_goes_on_from_a_synthetic_cache():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=50, **sizes, **heads)).eval()
    config = SfiConfig(slow_start=1, span=0, trigger_policy="stride", stride=3, budget=16, recent=8)
    with torch.no_grad(), slow_fast(model, None, config) as session:
        cache = synthetic_cache(session, 200, 210)
        for step in range(6):
            position = torch.tensor([[200 + step]])
            model(input_ids=torch.tensor([[step]]), position_ids=position, past_key_values=cache)
            session.run.record([step])
    request = session.report.requests[0]
    assert request.slow_at == [0, 3, 6]
    assert session.report.paths["torch.sparse_attention"] == 4 * 2
    assert 0.1 < request.read_ratio < 0.5
