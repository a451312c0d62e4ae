"""A cache full of random keys stands in for a long prompt."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from sfi_core import EngineOptions, SfiConfig, slow_fast
from sfi_core.generation.synthetic import BLOCK, SyntheticPrompt
from sfi_core.hosts.transformers.decoder import Decoder
from tests.covering import first

CONFIG = SfiConfig(slow_start=1, min_gap=0, span=0, trigger_policy="stride", stride=3, budget=16, recent=8)


def decode(model, prompt, config=CONFIG, steps=6, **options):
    """Return each step's logits, [steps, B, V], and the report."""
    batch, longest = len(prompt.contexts), max(prompt.contexts)
    ids_BT = torch.zeros(batch, longest, dtype=torch.long)
    padding = [longest - context for context in prompt.contexts]
    mask_BT = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long()
    with torch.no_grad(), slow_fast(model, None, config, **options) as session:
        decoder = Decoder(
            session=session, ids_BT=ids_BT, mask_BT=mask_BT, capacity=prompt.capacity, shared=prompt.shared(session)
        )
        decoder.prefill()
        decoder.run.record([1] * batch)
        logits = []
        for step in range(steps):
            logits.append(decoder.step([step + 1] * batch))
            decoder.run.record([step + 2] * batch)
        return torch.stack(logits), session.report


def test_decoding_goes_on_from_a_synthetic_cache(tiny_model):
    _, report = decode(tiny_model, SyntheticPrompt([200], 210))
    request = report.requests[0]
    assert request.slow_at == [0, 3, 6]
    assert [count for path, count in report.paths.items() if path.endswith(".sparse_attention")] == [4 * 2]
    assert 0.1 < request.read_ratio < 0.5


def test_a_request_of_a_ragged_batch_decodes_as_it_does_alone(tiny_model):
    contexts = [200, BLOCK + 77, 90]
    together, _ = decode(tiny_model, SyntheticPrompt(contexts, BLOCK + 90, seed=5))
    for row, context in enumerate(contexts):
        alone, _ = decode(tiny_model, SyntheticPrompt([context], context + 10, seed=5, rows=[row]))
        torch.testing.assert_close(together[:, row], alone[:, 0])
    assert not torch.allclose(together[:, 0], together[:, 2])


def test_runs_that_share_the_pages_start_from_the_same_state(tiny_model):
    prompt = SyntheticPrompt([150, 60], 170)
    first, _ = decode(tiny_model, prompt)
    pages = prompt.store
    dense, _ = decode(tiny_model, prompt, policy="full-kv")
    again, _ = decode(tiny_model, prompt)
    assert prompt.store is pages
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.allclose(first, dense)
    fresh, _ = decode(tiny_model, SyntheticPrompt([150, 60], 170), policy="full-kv")
    torch.testing.assert_close(dense, fresh, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("policy", "context", "change"),
    first(
        [
            ("sfi", BLOCK + 77, {"recent_mode": "sliding"}),
            ("freekv", 300, {"freekv": {"page": 8, "tau": 0.5}}),
            ("synckv", 300, {"synckv": {"heads": "even"}}),
        ]
    ),
)
def test_a_store_of_two_tiers_is_filled_for_every_run(tiny_model, policy, context, change):
    """Thirty decoded tokens turn the ring of 8 + 1 recent tokens over more than once."""
    contexts, steps = [context, 90], 30
    engine = EngineOptions(kv_device_budget="200kB", kv_page=4)
    prompt = SyntheticPrompt(contexts, context + steps, seed=3)
    device = SyntheticPrompt(contexts, context + steps, seed=3)
    options = {"policy": policy, "config": CONFIG.replace(**change), "steps": steps}
    whole, _ = decode(tiny_model, device, **options)
    for _ in range(2):
        logits, report = decode(tiny_model, prompt, engine=engine, **options)
        torch.testing.assert_close(logits, whole)
        assert report.kv_tiers.recalled_bytes > 0
        assert prompt.store.ring_pages * 4 < steps
    held = prompt.store.device_bytes + prompt.store.host_bytes
    assert prompt.held_bytes == held > device.held_bytes / 2
    again, _ = decode(tiny_model, prompt, policy="full-kv")
    dense, _ = decode(tiny_model, device, policy="full-kv")
    torch.testing.assert_close(again, dense, rtol=0, atol=0)


def test_sliding_windows_are_filled_as_if_the_context_had_been_read():
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    prompt = SyntheticPrompt([100, 40], 110)
    together, _ = decode(model, prompt)
    alone, _ = decode(model, SyntheticPrompt([100], 110))
    torch.testing.assert_close(together[:, 0], alone[:, 0])
