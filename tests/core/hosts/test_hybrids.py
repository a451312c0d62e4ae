"""Models that are not full attention alone: states, shared keys, windows, chunks, and the masks they make."""

import json
from functools import cache

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from sfi_core import AuditConfig, EngineOptions, SfiConfig, generate, slow_fast
from sfi_core.errors import UnsupportedModelError
from sfi_core.generation.synthetic import SyntheticPrompt
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.own_layers import states
from sfi_core.models.describe import describe_model
from sfi_core.sizes.step import ByteModel
from tests.architectures import BESIDE, BY_LABEL, RESULTS, padded, prompts, tiny
from tests.covering import case, first
from tests.fakes import RecordingObserver
from tests.sweep import SMALL, WHOLE, check
from tests.tiny_models import build

pytestmark = pytest.mark.seam
# linear attention, shared keys
KEPT = ("qwen3.5", "gemma-4")
ROWS = prompts(9, 37, 24)


@pytest.mark.parametrize("label", [case(model.label, kept=model.label in KEPT) for model in BESIDE])
def test_a_model_runs_as_the_sweep_says(label):
    """Full attention's tokens, alone, in batches, in pieces, joining; `tests/sweep.py` tries every model type."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")).get(transformers.__version__)
    notes = "; ".join(check(tiny(label)))
    if known is not None:
        assert known[BY_LABEL[label].model_type] == ["works", notes]


def decoded(label, rows, **options):
    settings = {"max_new_tokens": 12, "stop_token_ids": (), **options}
    return generate(tiny(label), None, rows, settings.pop("config", SMALL), **settings).report


@pytest.mark.parametrize("label", first(["lfm2", "falcon-h1", "gemma-3n"]))
def test_an_audited_step_leaves_no_mark_on_states_and_keys(label):
    """It runs twice; with every position read both passes give the same distribution."""
    seen = RecordingObserver()
    audited = decoded(label, ROWS, config=WHOLE, observers=[seen], audit=AuditConfig(every=1, top=4))
    assert audited.requests == decoded(label, ROWS, config=WHOLE).requests
    assert max(float(event.kl_R.max()) for event in seen.logits) < 1e-5
    sparse = decoded(label, ROWS, observers=[RecordingObserver()], audit=AuditConfig(every=2, top=4))
    assert sparse.requests == decoded(label, ROWS).requests


@pytest.mark.parametrize("label", first(["qwen3.5", "lfm2", "gemma-4"]))
def test_a_rejected_draft_leaves_the_states(label):
    config = SMALL.replace(draft={"max_tokens": 4, "adaptive": False})
    options = {"config": config, "max_new_tokens": 24}
    lossless = decoded(label, ROWS, policy="streaming-llm", engine=EngineOptions(lossless=True), **options)
    dense = decoded(label, ROWS, policy="full-kv", **options)
    assert [r.token_ids for r in lossless.requests] == [r.token_ids for r in dense.requests]
    counts = [request.lossless for request in lossless.requests]
    assert 0 < sum(count.accepted for count in counts) < sum(count.drafted for count in counts)


@pytest.mark.parametrize(("label", "mixer"), [("jamba", "JambaMambaMixer of layer 0"), ("zamba2", "Zamba2Mamba")])
def test_a_state_that_depends_on_the_pass_is_refused_losslessly(label, mixer):
    with pytest.raises(UnsupportedModelError, match=f"a lossless run does not run with .*: {mixer}"):
        decoded(label, ROWS, engine=EngineOptions(lossless=True))


def test_a_mixer_whose_state_takes_padding_is_refused(monkeypatch):
    module = "transformers.models.qwen3_5.modeling_qwen3_5.apply_mask_to_padding_states"
    monkeypatch.setattr(module, lambda hidden, mask: hidden)
    with pytest.raises(UnsupportedModelError) as refusal:
        decoded("qwen3.5", ROWS)
    assert str(refusal.value) == (
        "Qwen3_5ForCausalLM must have requests of one length together, got [9, 24, 37]: padding enters the state of "
        "Qwen3_5GatedDeltaNet of layer 0; use max_batch=1"
    )
    assert len(decoded("qwen3.5", ROWS, max_batch=1).requests) == len(ROWS)


@cache
def read(label, *rows):
    batch = padded([list(row) for row in rows])
    with slow_fast(tiny(label), None, SMALL) as session, torch.no_grad():
        ids, mask = batch["input_ids"], batch["attention_mask"]
        decoder = Decoder(session=session, ids_BT=ids, mask_BT=mask, capacity=64)
        decoder.prefill()
        return session, decoder.cache


@pytest.mark.parametrize("label", ["qwen3.5", "granite-4", "lfm2"])
def test_padding_enters_no_state(label):
    rows = [tuple(row) for row in ROWS]
    _, together = read(label, *rows)
    for number, row in enumerate(rows):
        _, alone = read(label, row)
        for layer, other in zip(together.layers, alone.layers, strict=True):
            for (_, _, ours), (_, _, theirs) in zip(states(layer), states(other), strict=True):
                torch.testing.assert_close(ours[number], theirs[0], rtol=1e-4, atol=1e-4)


def test_forecasts_count_states_once_and_shared_keys_once():
    session, cache = read("granite-4", tuple(ROWS[0]))
    held = sum(state.nbytes for layer in cache.layers for _, _, state in states(layer))
    assert session.forecast(1, 20, 64).sliding_bytes == held > 0
    model = ByteModel.of(describe_model(session.model, session.shapes()))
    assert model.state_bytes == held
    shared, cache = read("gemma-4", tuple(ROWS[0]))
    stored = sum(tensor.nbytes for pages in cache.run.store.layers.values() for tensor in pages.tensors[:2])
    assert shared.forecast(1, 20, cache.run.store.capacity).kv_bytes == stored


def test_random_prompts_stand_in_for_states_too():
    prompt = SyntheticPrompt([80, 33], 90)
    ids, mask = torch.zeros(2, 80).long(), (torch.arange(80) >= torch.tensor([[0], [47]])).long()
    for label in ("granite-4", "gemma-4"):
        with slow_fast(tiny(label), None, SMALL) as session, torch.no_grad():
            shared = prompt.shared(session)
            decoder = Decoder(session=session, ids_BT=ids, mask_BT=mask, capacity=90, shared=shared)
            decoder.prefill()
            decoder.run.record([1, 1])
            assert decoder.step([5, 6]).isfinite().all()
        prompt = SyntheticPrompt([80, 33], 90)


def test_an_image_that_is_seen_as_a_whole_is_refused_and_a_text_is_not():
    model, batch = build("gemma4_unified"), padded(prompts(20))
    assert model.config.get_text_config().use_bidirectional_attention == "vision"
    image = torch.zeros(1, 20).long().index_fill(1, torch.arange(5, 9), 1)
    with slow_fast(model, None, WHOLE), torch.no_grad():
        tokens = model.generate(**batch, max_new_tokens=4)
        with pytest.raises(UnsupportedModelError, match="makes a mask of its own, which sfi does not know"):
            model.generate(**batch, max_new_tokens=4, mm_token_type_ids=image)
    assert torch.equal(tokens, model.generate(**batch, max_new_tokens=4))


def test_a_kind_of_cache_that_sfi_does_not_know_is_refused(monkeypatch):
    class Odd(transformers.cache_utils.DynamicLayer):
        pass

    monkeypatch.setattr("sfi_core.hosts.transformers.checks.DynamicCache", lambda config: torch.nn.Module())
    monkeypatch.setattr(torch.nn.Module, "layers", [transformers.cache_utils.DynamicLayer(), Odd()], raising=False)
    with pytest.raises(UnsupportedModelError) as refusal, slow_fast(tiny("llama"), None, SMALL):
        pass
    assert str(refusal.value) == "LlamaForCausalLM has a layer that sfi does not know: layer 1 is cached as Odd"


RAGGED = prompts(37, 9, 24)
CONFIG = SfiConfig(trigger_token_ids=(0,))


class Masks(TorchDispatchMode):
    """Notes the sizes of all bool tensors [B, 1, T, S] that are made inside, a row of queries apart."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.bool and out.dim() == 4 and out.shape[1] == 1:
            self.sizes |= {tuple(out.shape)} if out.shape[2] > 1 < out.shape[3] else set()
        return out


def masks_of(label: str, rows=RAGGED, **options) -> set[tuple[int, ...]]:
    with Masks() as masks:
        generate(tiny(label), None, rows, CONFIG, max_new_tokens=3, stop_token_ids=(), **options)
    return masks.sizes


@pytest.mark.parametrize("chunk", [0, 16])
def test_a_ragged_batch_makes_no_mask_over_its_queries_and_keys(chunk: int):
    assert masks_of("qwen3", engine=EngineOptions(prefill_chunk=chunk)) == set()


def test_equal_prompts_read_in_pieces_make_none_either():
    assert masks_of("qwen3", prompts(37, 37), engine=EngineOptions(prefill_chunk=16)) == set()


def test_layers_with_a_sliding_window_have_theirs():
    assert (3, 1, 37, 37) in masks_of("gemma-2")


def test_a_call_outside_a_run_pays_heed_to_padding():
    model, batch = tiny("qwen3"), padded(RAGGED)
    expected = model(**batch, use_cache=False).logits[:, -1]
    with slow_fast(model, None, CONFIG), Masks() as masks:
        logits = model(**batch, use_cache=False).logits[:, -1]
    assert (3, 1, 37, 37) in masks.sizes
    torch.testing.assert_close(logits, expected)
    unpadded = model(torch.tensor([RAGGED[1]]), use_cache=False).logits[:, -1]
    torch.testing.assert_close(logits[1:2], unpadded)
