"""Plain `model.generate` in a lossless run: full attention's own tokens, whatever is asked of it."""

from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, TextIteratorStreamer
from transformers.generation import GenerateDecoderOnlyOutput

import sfi_core
from sfi_core import Sampling, SfiConfig, slow_fast
from sfi_core.errors import ConfigError, InputError
from sfi_core.hosts.transformers.cache import CACHE_NAME
from sfi_core.settings.config import DraftConfig
from tests import architectures
from tests.architectures import VOCABULARY, padded, prompts, tiny
from tests.core.hosts.test_session import Numbers
from tests.covering import first

pytestmark = pytest.mark.seam

STEPS = 20
SMALL = architectures.SMALL.replace(draft=DraftConfig(max_tokens=4))
ROWS = prompts(37, 9, 24)
LOSSLESS = sfi_core.EngineOptions(lossless=True)
LEAVE = "leave it out, or take run.cache() inside slow_fast(...) as run"


def complete(model, rows=ROWS, **options):
    return model.generate(**padded(rows), **{"max_new_tokens": STEPS, **options})


@contextmanager
def drafting(model, config: SfiConfig = SMALL):
    """A lossless session whose run has kept drafts and rejected some."""
    with slow_fast(model, None, config, engine=LOSSLESS) as session:
        yield session
    tallies = [state.tally for state in session.run.states]
    assert 0 < sum(tally.accepted for tally in tallies) < sum(tally.drafted for tally in tallies)


@pytest.mark.parametrize("label", first(["qwen3", "llama", "gemma-2", "gpt-oss"], 2))
def test_greedy_tokens_are_those_of_the_model_without_sfi(label: str):
    """A ragged batch; layers with windows read one request after the other, as sfi's own loop does."""
    model = tiny(label)
    expected = complete(model)
    with drafting(model) as session:
        sequences = complete(model)
    assert torch.equal(sequences, expected)
    assert [request.token_ids for request in session.report.requests] == expected[:, 37:].tolist()
    assert torch.equal(complete(model), expected)


def test_the_report_is_that_of_sfi_s_own_loop():
    model = tiny("qwen3")
    result = sfi_core.generate(model, None, ROWS, SMALL, max_new_tokens=STEPS, stop_token_ids=(), engine=LOSSLESS)
    with drafting(model) as session:
        complete(model)
    assert session.report.requests == result.report.requests
    assert all(request.lossless.accepted for request in session.report.requests)


OPTIONS = {
    "repetition": {"repetition_penalty": 1.7},
    "n-grams": {"no_repeat_ngram_size": 1},
    "at the begin": {"suppress_tokens": [3, 4], "begin_suppress_tokens": [5, 200]},
    "length": {"min_new_tokens": 5, "forced_eos_token_id": 7, "exponential_decay_length_penalty": (12, 1.02)},
    "rows": {"prefix_allowed_tokens_fn": lambda row, ids: range(3 + row * 40, 90 + row * 40)},
    "rows' prompts": {"encoder_repetition_penalty": 1.9, "encoder_no_repeat_ngram_size": 1},
    "pieces": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_processors_see_each_position_with_its_own_row(options: dict):
    """Rows of different lengths; a processor knows its row, or counts tokens."""
    model = tiny("qwen3")
    options = {**options, "eos_token_id": list(range(5, VOCABULARY, 30)), "pad_token_id": 0}
    expected = complete(model, **options)
    with drafting(model):
        sequences = complete(model, **options)
    assert torch.equal(sequences, expected)


@pytest.mark.parametrize("padding", [1, None])
def test_a_row_that_stops_early_is_padded_and_told_as_stopped(padding, monkeypatch):
    model = tiny("qwen3")
    stop = complete(model)[1, 37 + 6].item()
    monkeypatch.setattr(model.generation_config, "pad_token_id", padding)
    options = {"eos_token_id": [stop, 299]}
    expected = complete(model, **options)
    with drafting(model) as session:
        sequences = complete(model, **options)
    assert torch.equal(sequences, expected)
    requests = session.report.requests
    assert [request.finish_reason for request in requests].count("stop") == 1
    assert requests[1].token_ids == expected[1, 37 : 37 + len(requests[1].token_ids)].tolist()
    assert len(requests[1].token_ids) < len(requests[0].token_ids) == STEPS


SAMPLED = {"temperature": 1.4, "top_k": 40, "top_p": 0.95, "min_p": 0.001}


@pytest.mark.parametrize("label", first(["qwen3", "gemma-2"]))
def test_sampled_tokens_are_full_attention_s_with_the_same_seed(label: str):
    """sfi's own loop under full-kv draws its seed from torch's generator, as `model.generate` does here."""
    model = tiny(label)
    sampling = Sampling(repetition_penalty=1.2, **SAMPLED)
    never = SfiConfig(trigger_policy="never")
    torch.manual_seed(4)
    full = sfi_core.generate(
        model, None, ROWS, never, policy="full-kv", max_new_tokens=STEPS, sampling=sampling, stop_token_ids=()
    )
    tokens = []
    for seed in (4, 4, 5):
        torch.manual_seed(seed)
        with drafting(model):
            tokens.append(complete(model, do_sample=True, repetition_penalty=1.2, **SAMPLED)[:, 37:].tolist())
    assert tokens[0] == tokens[1] == [request.token_ids for request in full.report.requests]
    assert tokens[2] != tokens[0]


def test_several_return_sequences_are_requests_of_their_own():
    model = tiny("qwen3")
    with drafting(model) as session:
        sequences = complete(model, ROWS[:2], do_sample=True, num_return_sequences=2)
    requests = session.report.requests
    assert [request.prompt_tokens for request in requests] == [37, 37, 9, 9]
    assert [request.token_ids for request in requests] == sequences[:, 37:].tolist()
    assert len({tuple(row) for row in sequences.tolist()}) == 4


def test_a_dictionary_is_returned_where_it_is_asked_for():
    model = tiny("qwen3")
    with drafting(model):
        output = complete(model, return_dict_in_generate=True)
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert torch.equal(output.sequences, complete(model))


def test_a_streamer_gets_one_token_a_call_and_the_end():
    model = tiny("qwen3")
    streamer = TextIteratorStreamer(Numbers(), skip_prompt=True)
    calls = []
    put = streamer.put
    streamer.put = lambda value: (calls.append(tuple(value.shape)), put(value))
    with drafting(model):
        sequences = complete(model, ROWS[:1], streamer=streamer)
    assert [int(number) for number in "".join(streamer).split()] == sequences[0, 37:].tolist()
    assert calls == [(1, 37), *[(1,)] * STEPS]


class Stop(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores, **options) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamer:
    def put(self, value: torch.Tensor) -> None:
        """Take anything."""


REFUSED = {
    "output_scores": (True, "output_scores must be left out in a lossless run, got True"),
    "output_logits": (True, "output_logits must be left out in a lossless run, got True"),
    "stop_strings": (["x"], "stop_strings must be left out in a lossless run, got list"),
    "token_healing": (True, "token_healing must be left out in a lossless run, got True"),
    "max_time": (9.0, "max_time must be left out in a lossless run, got 9.0"),
    "stopping_criteria": ([Stop()], "stopping_criteria must be left out in a lossless run, got list"),
    "remove_invalid_values": (True, "remove_invalid_values must be left out in a lossless run, got True"),
    CACHE_NAME: (DynamicCache(), f"{CACHE_NAME} must be an sfi cache, got DynamicCache; {LEAVE}"),
    "streamer": (Streamer(), "prompts must be one with a streamer in a lossless run, got 3"),
    "num_beams": (2, "num_beams must be left out under sfi, got 2"),
    "custom_generate": ("user/repo", "custom_generate must be left out under sfi, got 'user/repo'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_lossless_run_cannot_do_is_refused_in_one_line(name: str):
    model, (value, message) = tiny("qwen3"), REFUSED[name]
    with slow_fast(model, None, SMALL, engine=LOSSLESS), pytest.raises(ConfigError) as caught:
        complete(model, **{name: value})
    assert str(caught.value) == message


def test_padding_on_the_right_and_a_cache_of_one_s_own_are_refused():
    model, batch = tiny("qwen3"), padded(ROWS)
    with slow_fast(model, None, SMALL, engine=LOSSLESS):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        with pytest.raises(ConfigError, match="must pad on the left"):
            model.generate(ids, attention_mask=mask.flip(1), max_new_tokens=3)
        with pytest.raises(InputError, match="prompt 0 must have at least one token"):
            model.generate(ids, attention_mask=0 * mask, max_new_tokens=3)
