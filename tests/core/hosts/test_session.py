"""`slow_fast`: what transformers' own `generate` may be asked under it, and what it refuses."""

from contextvars import copy_context
from functools import partial
from threading import Thread

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, TextIteratorStreamer

from benchmarks.train_bundled import build_tokenizer
from sfi_core import EngineOptions, SfiConfig, generate, slow_fast
from sfi_core.errors import BackendError, ConfigError, InputError, UnsupportedModelError
from sfi_core.hosts.transformers.attention import sfi_attention
from sfi_core.hosts.transformers.cache import CACHE_NAME, SfiCache, cache_in, under_way
from sfi_core.triggers.trigger import build_trigger_set
from tests.architectures import SMALL, padded, prompts, tiny

pytestmark = pytest.mark.seam

STEPS = 10
ROWS = prompts(37, 9, 24)


@pytest.fixture
def model():
    return tiny("qwen3")


def complete(model, rows=ROWS, **options):
    """Run `model.generate`; return the new tokens of each row."""
    batch = padded(rows)
    output = model.generate(**batch, **{"max_new_tokens": STEPS, **options})
    return output[:, batch["input_ids"].shape[1] :].tolist()


@pytest.fixture
def expected(model):
    with slow_fast(model, None, SMALL):
        return complete(model)


class Numbers:
    def decode(self, token_ids, **options):
        return "".join(f"{token} " for token in token_ids)


class StopAfter(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **options):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Only(LogitsProcessor):
    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores):
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        allowed[:, self.tokens] = True
        return scores.masked_fill(~allowed, -torch.inf)


LEAVE = "leave it out, or take run.cache() inside slow_fast(...) as run"
MODES = {
    "num_beams": (2, "num_beams must be left out under sfi, got 2"),
    "assistant_model": (torch.nn.Identity(), "assistant_model must be left out under sfi, got Identity"),
    "prompt_lookup_num_tokens": (1, "prompt_lookup_num_tokens must be left out under sfi, got 1"),
    "penalty_alpha": (1.0, "penalty_alpha must be left out under sfi, got 1.0"),
    "dola_layers": ("low", "dola_layers must be left out under sfi, got 'low'"),
    "guidance_scale": (1.5, "guidance_scale must be left out under sfi, got 1.5"),
    "cache_implementation": ("static", "cache_implementation must be left out under sfi, got 'static'"),
    "custom_generate": ("user/repo", "custom_generate must be left out under sfi, got 'user/repo'"),
    "use_cache": (False, "use_cache must be true under sfi, got False"),
    "output_attentions": (True, "output_attentions must be left out under sfi, got True"),
    CACHE_NAME: (DynamicCache(), f"{CACHE_NAME} must be an sfi cache, got DynamicCache; {LEAVE}"),
}


@pytest.mark.parametrize("name", MODES)
def test_generation_mode_is_refused_in_one_line(model, name):
    value, message = MODES[name]
    with slow_fast(model, None, SMALL), pytest.raises(ConfigError) as refusal:
        complete(model, **{name: value})
    assert str(refusal.value) == message


def test_mode_in_the_models_own_generation_config_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    with slow_fast(model, None, SMALL), pytest.raises(ConfigError, match="num_beams must be left out"):
        complete(model)


def test_hybrid_cache_that_older_checkpoints_ask_for_is_dropped_as_transformers_does(model, expected, monkeypatch):
    """Gemma 2's generation config on the hub names it."""
    monkeypatch.setattr(model.generation_config, "cache_implementation", "hybrid")
    with slow_fast(model, None, SMALL):
        assert complete(model) == expected


def test_padding_on_the_right_or_inside_a_prompt_is_refused(model):
    batch = padded(ROWS)
    mask = batch["attention_mask"].flip(1)
    with slow_fast(model, None, SMALL), pytest.raises(ConfigError, match="must pad on the left"):
        model.generate(batch["input_ids"].flip(1), attention_mask=mask, max_new_tokens=2)
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[0, 4] = 0
    with slow_fast(model, None, SMALL), pytest.raises(ConfigError, match="got padding inside"):
        model.generate(torch.ones(1, 9).long(), attention_mask=mask, max_new_tokens=2)


def test_row_of_nothing_but_padding_is_refused(model):
    batch = padded(ROWS)
    batch["attention_mask"][1] = 0  # transformers only warns
    with slow_fast(model, None, SMALL), pytest.raises(InputError) as refusal:
        model.generate(**batch, max_new_tokens=2)
    assert str(refusal.value) == "prompt 1 must have at least one token, got none"


@pytest.mark.parametrize("lossless", [False, True])
def test_one_mask_for_all_rows_integers_of_32_bits_and_arguments_by_place_run_as_in_transformers(model, lossless):
    ids, mask = torch.tensor(prompts(20, 20, 20)).int(), torch.ones(1, 20).int()
    options = {"attention_mask": mask, "max_new_tokens": STEPS}
    alone = model.generate(ids, None, [Only(range(5, 200))], **options)
    policy = None if lossless else "full-kv"
    with slow_fast(model, None, SMALL, policy=policy, engine=EngineOptions(lossless=lossless)):
        sequences = model.generate(ids, None, [Only(range(5, 200))], **options)
    assert torch.equal(sequences, alone)
    assert sequences.dtype == alone.dtype


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize(
    ("shape", "mask", "message"),
    [
        ((1, 30), (1, 20), "attention_mask must be 1 x 30, a row for each prompt, got 1 x 20"),
        ((3, 9), (2, 9), "attention_mask must be 3 x 9, a row for each prompt, got 2 x 9"),
        ((1, 0), (1, 0), "prompts must have at least one token each, got a batch of 1 x 0"),
        ((0, 4), (0, 4), "prompts must have at least one token each, got a batch of 0 x 4"),
    ],
)
def test_mask_or_prompt_of_a_wrong_size_is_refused(model, shape, mask, message, lossless):
    with (
        slow_fast(model, None, SMALL, engine=EngineOptions(lossless=lossless)),
        pytest.raises((ConfigError, InputError)) as refusal,
    ):
        model.generate(torch.ones(shape).long(), attention_mask=torch.ones(mask).long(), max_new_tokens=2)
    assert str(refusal.value) == message


def test_mask_of_four_dimensions_is_refused(model):
    with slow_fast(model, None, SMALL) as session, pytest.raises(ConfigError, match="two-dimens"):
        model(input_ids=torch.ones(1, 4).long(), attention_mask=torch.ones(1, 1, 4, 4), **{CACHE_NAME: session.cache()})


def test_nested_use_on_one_model_is_refused_and_leaves_the_outer_one_working(model, expected):
    with slow_fast(model, None, SMALL):
        with pytest.raises(ConfigError, match="must not be nested on one model"), slow_fast(model, None, SMALL):
            pass
        with pytest.raises(ConfigError, match="must not be nested on one model"):
            generate(model, None, ROWS, SMALL)
        assert complete(model) == expected


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "cuda"}, ConfigError, "unknown backend 'cuda'"),
        ({"backend": "triton"}, BackendError, "need a CUDA dev"),
        ({"policy": "sfy"}, ConfigError, "unknown policy 'sfy'"),
        ({"config": SfiConfig()}, ConfigError, "triggers need a tokenizer, got none"),
        (
            {"config": SMALL.replace(dense_layers=(0, 99))}, ConfigError,
            r"dense_layers must be among the full-attention layers \[0, 1\], got \[99\]$",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_session_cannot_be_given_is_refused(model, options, error, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def begin(backend="auto", config=SMALL, policy="sfi"):
        engine = EngineOptions(backend=backend)
        slow_fast(model, None, config, policy=policy, engine=engine).__enter__()

    with pytest.raises(error, match=message):
        begin(**options)


@pytest.mark.parametrize("policy", ["codescan", "streaming-llm"])
def test_a_policy_without_a_trigger_needs_no_tokenizer(model, policy: str):
    with slow_fast(model, None, SfiConfig(), policy=policy) as session:
        assert session.trigger_token_ids == ()


def test_attention_that_sfi_does_not_know_is_refused_by_name(model, monkeypatch):
    attention, query = model.model.layers[0].self_attn, torch.zeros(1, 4, 1, 16)
    monkeypatch.setattr("sfi_core.hosts.transformers.cache.SfiCache.attending", lambda cache, module: None)
    context = copy_context()
    context.run(under_way.set, SfiCache(model, None, None, frozenset()))
    attend = partial(context.run, sfi_attention, attention, query, query, query, None)
    message = r"^Qwen3Attention passes attention arguments .* not know: \['position_bias'\]$"
    with pytest.raises(UnsupportedModelError, match=message):
        attend(position_bias=query)
    with pytest.raises(UnsupportedModelError, match="attends in both directions"):
        attend(is_causal=False)


def test_layer_that_does_not_route_is_refused_at_once(model, monkeypatch):
    """A model may look as if it routed, and still have a layer of its own."""
    layer = model.model.layers[1].self_attn

    def attend_alone(hidden_states, **options):
        key = torch.zeros(len(hidden_states), 2, hidden_states.shape[1], 16)
        cache_in(options).update(key, key, layer.layer_idx)
        return hidden_states, None

    monkeypatch.setattr(layer, "forward", attend_alone)
    with slow_fast(model, None, SMALL), pytest.raises(UnsupportedModelError) as refusal:
        complete(model, max_new_tokens=1)
    assert str(refusal.value) == (
        "Qwen3ForCausalLM has layers [1] that do not attend through transformers' attention interface"
    )


def test_layer_that_does_not_update_its_cache_is_refused(model, monkeypatch):
    monkeypatch.setattr(
        "sfi_core.hosts.transformers.cache.SfiLayer.update", lambda self, key, value, *rest, **options: (key, value)
    )
    with (
        slow_fast(model, None, SMALL),
        pytest.raises(UnsupportedModelError, match="Qwen3Attention of layer 0 attends twice, or to keys of its own"),
    ):
        complete(model)


def test_generate_taken_before_the_session_is_refused_and_does_not_run_densely(model):
    taken = model.generate
    with slow_fast(model, None, SMALL), pytest.raises(ConfigError, match="got DynamicCache"):
        taken(torch.ones(1, 9).long(), max_new_tokens=3)


def test_forward_pass_without_a_cache_stays_full_attention(model):
    batch = padded(ROWS)
    dense = model(**batch, use_cache=False).logits
    with slow_fast(model, None, SMALL) as session:
        inside = model(**batch, use_cache=False).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(inside[real], dense[real])
    assert session.report is None


def test_autocast_is_refused_where_it_mixes_dtypes(model):
    with slow_fast(model, None, SMALL), torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError) as refusal:
        complete(model)
    assert str(refusal.value) == (
        "queries, keys and values must have one dtype under sfi, got float32, float32, bfloat16; leave torch.autocast, "
        "and load the model in that dtype"
    )


def test_cache_of_an_ended_session_is_refused(model):
    with slow_fast(model, None, SMALL) as session:
        cache = session.cache()
        model(input_ids=torch.ones(1, 9).long(), **{CACHE_NAME: cache})
    with pytest.raises(UnsupportedModelError, match=r"works inside slow_fast\(\.\.\.\) only"):
        model(input_ids=torch.ones(1, 1).long(), **{CACHE_NAME: cache})


def test_streamer_gets_the_tokens_of_a_run_without_one(model):
    with slow_fast(model, None, SMALL):
        plain = complete(model, ROWS[:1])
        streamer = TextIteratorStreamer(Numbers(), skip_prompt=True)
        thread = Thread(target=complete, args=(model, ROWS[:1]), kwargs={"streamer": streamer})
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert [int(number) for number in text.split()] == plain[0]


def test_stopping_criterion_ends_the_run(model, expected):
    with slow_fast(model, None, SMALL) as session:
        tokens = complete(model, stopping_criteria=[StopAfter(37 + 4)])
    assert tokens == [row[:4] for row in expected]
    assert [request.token_ids for request in session.report.requests] == tokens


RUNS = {
    "stop_strings": {"stop_strings": ["\n"]},
    "tokenizers": {"assistant_tokenizer": True},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "no guidance": {"negative_prompt_ids": torch.ones(3, 4).long()},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row + 3, 90))},
    "positions": {"position_ids": (padded(ROWS)["attention_mask"].cumsum(1) - 1).clamp_min(0)},
    "several": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    "length": {"max_new_tokens": None, "max_length": 45},
    "others": {"synced_gpus": False, "labels": None, "max_time": 1e4},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_argument_of_generate_runs_as_in_transformers(model, options):
    """`stop_strings` and assisted decoding ask for tokenizers, which transformers hands on to the attention."""
    tokenizer = build_tokenizer(280)
    options = {name: tokenizer if name == "assistant_tokenizer" else value for name, value in options.items()}
    if "stop_strings" in options or "assistant_tokenizer" in options:
        options["tokenizer"] = tokenizer
    options = {**padded(ROWS), "max_new_tokens": STEPS, **options}
    alone = model.generate(**options)
    with slow_fast(model, None, SMALL, policy="full-kv"):
        output = model.generate(**options)
    for name, value in ({"sequences": alone} if isinstance(alone, torch.Tensor) else alone).items():
        if name != CACHE_NAME:
            torch.testing.assert_close(output if isinstance(output, torch.Tensor) else output[name], value)


@pytest.mark.parametrize("lossless", [False, True])
def test_stop_token_may_be_a_tensor_and_an_argument_of_the_model_none(model, expected, lossless):
    stop = expected[1][3]
    options = {"eos_token_id": torch.tensor(stop), "pad_token_id": 0, "labels": None}
    with slow_fast(model, None, SMALL, engine=EngineOptions(lossless=lossless)) as session:
        complete(model, **options)
    request = session.report.requests[1]
    assert (request.token_ids.index(stop), request.finish_reason) == (len(request.token_ids) - 1, "stop")
    assert lossless or request.token_ids == expected[1][: expected[1].index(stop) + 1]


def test_logits_processor_decides_what_is_picked_and_what_triggers(model):
    config = SMALL.replace(trigger_token_ids=(11,), trigger_delay=0, t_max=90)
    with slow_fast(model, None, config) as session:
        tokens = complete(model, logits_processor=[Only([11, 12, 13])])
    for row, request in zip(tokens, session.report.requests, strict=True):
        assert set(row) <= {11, 12, 13}
        assert request.slow_at == [0, *(t + 1 for t, token in enumerate(row[:-1]) if token == 11)]
    assert any(11 in row for row in tokens)


@pytest.mark.parametrize("label", ["qwen3", "gemma-2"])
def test_content_of_the_padding_does_not_matter(label):
    model, batch = tiny(label), padded(ROWS)
    other = torch.where(batch["attention_mask"] == 1, batch["input_ids"], 77)
    with slow_fast(model, None, SMALL):
        first = model.generate(**batch, max_new_tokens=STEPS)
        second = model.generate(other, attention_mask=batch["attention_mask"], max_new_tokens=STEPS)
    assert torch.equal(first[:, 37:], second[:, 37:])


def test_runs_of_one_session_do_not_know_of_each_other(model, expected):
    with slow_fast(model, None, SMALL) as session:
        complete(model, prompts(30), max_new_tokens=3)
        assert complete(model) == expected
        first = session.report
        assert complete(model) == expected
        assert session.report.requests == first.requests
        assert session.report is not first


def test_loop_of_ones_own_around_the_model_equals_generate(model, expected):
    batch = padded(ROWS)
    mask, ids = batch["attention_mask"], batch["input_ids"]
    tokens = []
    with slow_fast(model, None, SMALL) as session:
        cache = session.cache()
        for _ in range(STEPS):
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, **{CACHE_NAME: cache}).logits
            ids = logits[:, -1:].argmax(-1)
            tokens.append(ids)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        session.run.record(ids[:, 0].tolist())
    assert torch.cat(tokens, 1).tolist() == expected
    assert [request.token_ids for request in session.report.requests] == expected


def test_loop_that_passes_its_cache_by_position_is_refused_and_does_not_run_densely(model):
    ids = torch.ones(1, 9).long()
    with slow_fast(model, None, SMALL) as session, pytest.raises(UnsupportedModelError):
        model(ids, None, None, session.cache())


def test_trigger_strings_become_the_tokenizers_ids(model):
    tokenizer = build_tokenizer(512)
    with slow_fast(model, tokenizer, SfiConfig()) as session:
        expected = build_trigger_set(tokenizer, SfiConfig().triggers).token_ids
        assert session.trigger_token_ids == expected != ()


@pytest.mark.parametrize("policy", ["t-max", "stride", "never", "always"])
def test_other_trigger_policies_need_no_tokenizer(model, policy):
    config = SfiConfig(trigger_policy=policy, t_max=3, stride=4, slow_start=1, min_gap=0)
    with slow_fast(model, None, config) as session:
        complete(model, ROWS[:1])
    slow = {"t-max": [0, 4, 8], "stride": [0, 4, 8], "never": [0], "always": list(range(STEPS))}
    assert session.report.requests[0].slow_at == slow[policy]
