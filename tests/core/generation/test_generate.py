"""`sfi_core.generate`: when requests end, which steps are slow, and what a run that breaks off keeps."""

from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from benchmarks.train_bundled import build_tokenizer
from sfi_core import EngineOptions, NullObserver, Sampling, generate, slow_fast
from sfi_core.errors import ConfigError, InputError, NumericsError
from sfi_kernels.dense_attention import dense_attention
from tests.architectures import SMALL, prompts, tiny
from tests.fakes import RecordingObserver, break_logits, tokens

pytestmark = pytest.mark.seam

STEPS = 12
ROWS = prompts(37, 9, 24)
PAD = 0


@pytest.fixture
def model():
    return tiny("qwen3")


def run(model, rows=ROWS, config=SMALL, **options):
    return generate(model, None, rows, config, **{"max_new_tokens": STEPS, **options})


@pytest.fixture
def expected(model):
    return tokens(run(model))


@pytest.fixture
def stop(expected):
    """A token that the second request generates at step 3 for the first time."""
    assert expected[1].index(expected[1][3]) == 3
    return expected[1][3]


def until(row, stop):
    return row[: row.index(stop) + 1] if stop in row else row


def test_stop_token_ends_its_request_and_the_others_go_on(model, expected, stop):
    result = run(model, stop_token_ids=[stop])
    assert tokens(result) == [until(row, stop) for row in expected]
    reasons = [request.finish_reason for request in result.report.requests]
    assert reasons == ["stop" if stop in row else "length" for row in expected]
    assert set(reasons) == {"stop", "length"}


@pytest.mark.parametrize("lossless", [False, True])
def test_a_sampling_and_a_seed_for_each_prompt_give_what_each_gives_alone(model, lossless):
    samplings = [Sampling(), Sampling(temperature=2.0, repetition_penalty=1.3), Sampling(temperature=0.7)]
    engine, seeds = EngineOptions(lossless=lossless), [3, 3, 9]
    drafting = {"engine": engine, "policy": "codescan" if lossless else None}
    together = run(model, sampling=samplings, seed=seeds, max_batch=2, **drafting)
    alone = [
        tokens(run(model, [row], sampling=sampling, seed=seed, **drafting))[0]
        for row, sampling, seed in zip(ROWS, samplings, seeds, strict=True)
    ]
    assert (tokens(together), together.seed) == (alone, seeds)
    if lossless:
        assert alone == tokens(run(model, policy="full-kv", sampling=samplings, seed=seeds))
    with pytest.raises(ConfigError, match="seed must be one for all or 3, one a prompt, got 2"):
        run(model, sampling=samplings, seed=[1, 2])


def test_each_completion_is_told_once_as_it_ends(model, expected):
    ended = []
    result = run(model, max_new_tokens=[4, 2, 3], max_batch=2, on_end=lambda *completion: ended.append(completion))
    assert [request for request, _, _ in ended] == [1, 0, 2]
    assert [report.token_ids for _, report, _ in sorted(ended, key=lambda completion: completion[0])] == tokens(result)
    assert {report.finish_reason for _, report, _ in ended} == {"length"}


@pytest.mark.parametrize("form", [int, torch.tensor, lambda stop: torch.tensor([stop])])
def test_stop_token_may_be_a_number_or_a_tensor(model, expected, stop, form):
    assert tokens(run(model, stop_token_ids=form(stop))) == [until(row, stop) for row in expected]


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize(("pad", "stops"), [(300, []), (-1, []), (None, [5000])])
def test_padding_token_that_the_model_lacks_does_no_harm(model, expected, stop, monkeypatch, pad, stops, lossless):
    monkeypatch.setattr(model.generation_config, "pad_token_id", pad)
    monkeypatch.setattr(model.generation_config, "eos_token_id", [*stops, stop])
    if lossless:
        expected = tokens(run(model, policy="full-kv", stop_token_ids=()))
    assert tokens(run(model, engine=EngineOptions(lossless=lossless))) == [until(row, stop) for row in expected]


def test_stop_tokens_of_the_model_are_the_default_and_empty_ones_turn_them_off(model, expected, stop, monkeypatch):
    monkeypatch.setattr(model.generation_config, "eos_token_id", stop)
    assert tokens(run(model)) == [until(row, stop) for row in expected]
    assert tokens(run(model, stop_token_ids=())) == expected


def due(generated, config):
    """Say which steps Eq. 5, T_max and the gap make slow, from the token ids alone."""
    slow = {0: "first"}
    for step in range(1, len(generated)):
        past = step - max(slow)  # steps from the last slow one
        boundary = step - 1 - config.trigger_delay
        ended = boundary >= 0 and generated[boundary] in SMALL.trigger_token_ids
        if ended and past >= config.min_gap:
            slow[step] = "trigger"
        elif past > config.t_max:
            slow[step] = "t_max"
    return slow


@pytest.mark.parametrize(
    ("t_max", "min_gap", "delay", "seed"),
    [(4, 0, 0, 0), (4, 0, 1, 1), (3, 3, 0, 2), (3, 3, 1, 0), (0, 0, 1, 1), (90, 5, 0, 2)],
)
def test_slow_steps_are_those_of_eq_5_and_t_max(model, t_max, min_gap, delay, seed):
    """Eq. 5, recomputed from the reported token ids of a ragged batch."""
    config = SMALL.replace(t_max=t_max, min_gap=min_gap, trigger_delay=delay)
    rows = prompts(37 - 9 * seed, 5, 20 + seed)
    result = run(model, rows, config, max_new_tokens=30, seed=seed, sampling=Sampling(temperature=1.0))
    for request in result.report.requests:
        slow = due(request.token_ids, config)
        assert request.slow_at == list(slow)
        assert request.reasons == {why: [*slow.values()].count(why) for why in slow.values()}
        assert request.fast_steps == 30 - len(slow)


def test_slow_steps_of_the_requests_of_a_batch_differ(model):
    assert len({tuple(r.slow_at) for r in run(model).report.requests}) == 3


def test_nan_that_attention_makes_of_a_prompt_is_named(model, monkeypatch):
    """Of a query in the middle, whose row no logits are made of; as the model of transformers' own loop too."""

    def broken(query, *others, **options):
        out = dense_attention.reference(query, *others, **options)
        out[:, 0, 0, 2] = torch.nan
        return out

    monkeypatch.setattr("sfi_core.engine.layer.dense_attention", SimpleNamespace(on=lambda _: broken))
    model = deepcopy(model).bfloat16()
    message = (
        "attention of a prompt must be finite, got NaN or infinity in bfloat16 in layer 0, of finite queries, keys "
        "and values; load the model in float32 (sfi doctor tries the dtypes)"
    )
    result = run(model)
    assert isinstance(result.error, NumericsError)
    assert str(result.error) == message
    with slow_fast(model, None, SMALL), pytest.raises(NumericsError) as caught:
        model.generate(torch.tensor([ROWS[0]]), max_new_tokens=2)
    assert str(caught.value) == message


def test_nan_of_the_model_is_not_called_attention_s(model):
    model = deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(torch.inf)
    assert str(run(model).error) == "logits must be finite, got NaN or infinity at step 0 in request 0"


def test_nan_logits_end_the_run_with_the_step_and_keep_the_tokens_so_far(model, expected):
    shown = []
    with break_logits(model, lambda: len(shown) == 5, row=1):
        result = run(model, on_token=shown.append)
    assert isinstance(result.error, NumericsError)
    assert str(result.error) == ("logits must be finite, got NaN or infinity at step 5 in request 1")
    assert tokens(result) == [row[:5] for row in expected]
    assert [request.finish_reason for request in result.report.requests] == ["error"] * 3
    assert not result.interrupted


def test_nan_logits_of_a_request_that_has_ended_do_no_harm(model, expected, stop):
    shown = []
    with break_logits(model, lambda: len(shown) >= 4, row=1):
        result = run(model, on_token=shown.append, stop_token_ids=[stop])
    assert result.error is None
    assert tokens(result) == [until(row, stop) for row in expected]


@pytest.mark.parametrize("ended", ["error", "interrupted"])
def test_reasons_of_a_run_that_breaks_off_add_up_to_its_slow_steps(model, ended):
    shown = []

    def broken():
        if len(shown) == 3 and ended == "interrupted":
            raise KeyboardInterrupt
        return len(shown) == 3

    with break_logits(model, broken):
        result = run(model, config=SMALL.replace(t_max=0), on_token=shown.append)
    for request in result.report.requests:
        assert (request.slow_steps, request.finish_reason) == (3, ended)
        assert sum(request.reasons.values()) == 3


def test_observer_does_not_change_a_token(model):
    sampling = Sampling(top_k=9)
    plain = run(model, seed=3, sampling=sampling)
    watched = run(model, seed=3, sampling=sampling, observers=[RecordingObserver(), NullObserver()])
    assert watched.report.requests == plain.report.requests


def test_observer_gets_a_span_for_each_group_of_fast_neighbors(model):
    recorder = RecordingObserver()
    result = run(model, observers=[recorder])
    slow = [set(request.slow_at) for request in result.report.requests]
    lengths = [len(request.token_ids) for request in result.report.requests]
    groups = 0
    for step in range(1, max(lengths)):
        kinds = [step < n and step not in at for n, at in zip(lengths, slow, strict=True)]
        groups += sum(fast and not before for before, fast in pairwise([False, *kinds]))
    assert recorder.spans.count(("attention.fast", 1)) == groups > 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "prompts must not be empty, got none"),
        ([[5], []], "prompt 1 must have at least one token, got none"),
        ([""], "prompt 0 must have at least one token, got none"),
        ([[5], [5] * 501], "prompt 1 and 12 new tokens must fit the model's 512 positions, got 501 prompt tokens"),
        ([[5], [5, 300]], "prompt 1 must have tokens below the model's 300, got 300"),
    ],
    ids=["no prompt", "no ids", "no text", "too long", "unknown token"],
)
def test_prompt_that_cannot_be_read_is_refused(model, rows, message):
    tokenizer = build_tokenizer(512)
    with pytest.raises(InputError) as refusal:
        generate(model, tokenizer, rows, SMALL, max_new_tokens=12)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "prompts", ["zx", [72, 105], torch.tensor([72, 105]), torch.tensor([[72, 105]]), [torch.tensor([72, 105])]]
)
def test_one_prompt_without_a_list_around_it_is_one_prompt(model, prompts):
    tokenizer = build_tokenizer(280)
    ids = tokenizer("zx")["input_ids"] if isinstance(prompts, str) else [72, 105]
    result = generate(model, tokenizer, prompts, SMALL, max_new_tokens=3)
    assert tokens(result) == tokens(run(model, [ids], max_new_tokens=3))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([{"role": "user", "content": "Hi"}], "prompt 0 must be text or token ids, got dict"),
        ({"input_ids": [5]}, "prompts must be text or token ids, got dict; pass its input_ids"),
        ([[5], [5.5]], "prompt 1 must be text or token ids, got list"),
        ([[5], None], "prompt 1 must be text or token ids, got NoneType"),
    ],
)
def test_prompt_that_is_neither_text_nor_token_ids_is_refused(model, prompts, message):
    with pytest.raises(InputError) as refusal:
        run(model, prompts)
    assert str(refusal.value) == message


def test_text_prompt_without_a_tokenizer_is_refused(model):
    with pytest.raises(ConfigError, match="text prompts need a tokenizer, got none"):
        run(model, ["Hello."])


def test_one_token_prompt_runs_alone_and_beside_the_longest_that_fits(model):
    alone, beside = run(model, [[7]]), run(model, [[5] * 500, [7]])
    assert alone.report.requests[0] == beside.report.requests[1]
    assert len(beside.report.requests[0].token_ids) == STEPS


def test_progress_of_the_prompt_comes_piece_by_piece(model):
    calls, pieces = [], EngineOptions(prefill_chunk=16)
    run(model, engine=pieces, on_prefill=lambda *progress: calls.append(progress))
    assert calls == [(16, 37), (32, 37), (37, 37)]


def test_repetition_penalty_of_a_row_does_not_see_its_padding(model):
    """Padding is often the stop token, which must not become less likely in longer batches."""
    penalty = {"sampling": Sampling(repetition_penalty=5.0)}
    favored = torch.zeros(300)
    favored[PAD] = 6.0

    def favor_padding(module, args, output):
        return output + favored

    with model.lm_head.register_forward_hook(favor_padding):
        together = run(model, **penalty)
        alone = [tokens(run(model, [row], **penalty))[0] for row in ROWS]
    assert tokens(together) == alone


def test_completions_come_as_text_too():
    tokenizer = build_tokenizer(512)
    result = generate(tiny("qwen3"), tokenizer, ROWS, SMALL, max_new_tokens=4)
    assert result.texts == [tokenizer.decode(row, skip_special_tokens=True) for row in tokens(result)]
    assert all(result.texts)
