"""Several threads and one model: no call changes another's tokens, and plain calls beside stay plain."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Thread

import pytest
import torch

import sfi_core
from sfi_core import slow_fast
from sfi_core.hosts.transformers.cache import CACHE_NAME
from tests.architectures import SMALL, prompts, tiny

pytestmark = pytest.mark.seam

ROWS = prompts(37, 41)
STEPS = 8
LABELS = ["qwen3", "gpt-oss"]  # the latter attends eagerly, with learned sinks and sliding windows


def complete(model, row):
    """Run `model.generate`; return the new tokens."""
    return model.generate(torch.tensor([row]), max_new_tokens=STEPS, do_sample=False)[0, len(row) :].tolist()


def decode(model, row):
    """Run sfi's own loop; return the new tokens."""
    return sfi_core.generate(model, None, [row], SMALL, max_new_tokens=STEPS).report.requests[0].token_ids


def own_loop(model, session, row, together):
    """Decode with a loop of one's own, each pass beside another thread's; return the new tokens."""
    cache, ids, tokens = session.cache(), torch.tensor([row]), []
    for _ in range(STEPS):
        together.wait(60)
        position = torch.arange(cache.seen, cache.seen + ids.shape[1])[None]
        output = model(input_ids=ids, position_ids=position, **{CACHE_NAME: cache})
        ids = output.logits[:, -1:].argmax(-1)
        tokens.append(ids.item())
    return tokens


@contextmanager
def within(model, call):
    """Make one call from another thread in the middle of the next forward pass of the model; yield its results."""
    results = []

    def interrupt(module, args):
        hook.remove()
        thread = Thread(target=lambda: results.append(call()))
        thread.start()
        thread.join(60)

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    yield results


def in_threads(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [job.result(60) for job in [pool.submit(call) for call in calls]]


def test_calls_of_two_threads_in_one_slow_fast_are_those_of_each_alone():
    model = tiny("qwen3")
    with slow_fast(model, None, SMALL):
        alone = [complete(model, row) for row in ROWS]
    with slow_fast(model, None, SMALL) as run:

        def call(row):
            tokens = complete(model, row)
            return tokens, run.report.requests[0].token_ids

        for _ in range(4):
            results = in_threads(lambda: call(ROWS[0]), lambda: call(ROWS[1]))
            assert results == [(tokens, tokens) for tokens in alone]


def test_own_loops_of_two_threads_in_one_slow_fast_are_those_of_each_alone():
    model = tiny("qwen3")
    with torch.no_grad(), slow_fast(model, None, SMALL) as run:
        alone = [own_loop(model, run, row, Barrier(1)) for row in ROWS]
        together = Barrier(2)
        loops = [torch.no_grad()(lambda row=row: own_loop(model, run, row, together)) for row in ROWS]
        assert in_threads(*loops) == alone


def test_runs_of_two_threads_wait_for_each_other():
    model = tiny("qwen3")
    alone = [decode(model, row) for row in ROWS]

    def under_slow_fast():
        with slow_fast(model, None, SMALL):
            return complete(model, ROWS[1])

    assert in_threads(lambda: decode(model, ROWS[0]), lambda: decode(model, ROWS[1])) == alone
    assert in_threads(lambda: decode(model, ROWS[0]), under_slow_fast) == alone


@pytest.mark.parametrize("label", LABELS)
def test_a_plain_call_in_the_middle_of_a_run_is_plain_and_changes_nothing(label):
    model = tiny(label)
    alone, plain = decode(model, ROWS[0]), complete(model, ROWS[1])
    with within(model, lambda: complete(model, ROWS[1])) as results:
        assert decode(model, ROWS[0]) == alone
    assert results == [plain]


@pytest.mark.parametrize("label", LABELS)
def test_a_run_in_the_middle_of_a_plain_pass_changes_no_logit(label):
    """It begins and ends while the pass is under way: masks were made before, layers attend after."""
    model, ids = tiny(label), torch.tensor([ROWS[1]])
    with torch.no_grad():
        alone, plain = decode(model, ROWS[0]), model(input_ids=ids).logits
        with within(model, lambda: decode(model, ROWS[0])) as results:
            torch.testing.assert_close(model(input_ids=ids).logits, plain, atol=0, rtol=0)
    assert results == [alone]


@pytest.mark.parametrize("label", LABELS)
def test_a_plain_pass_while_a_model_is_under_sfi_has_its_own_attention(label):
    model, ids = tiny(label), torch.tensor([ROWS[1]])
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with slow_fast(model, None, SMALL):
            torch.testing.assert_close(model(input_ids=ids).logits, plain, atol=0, rtol=0)


def test_a_long_wait_for_another_thread_is_said(monkeypatch, caplog):
    monkeypatch.setattr("sfi_core.hosts.transformers.slow_fast.PATIENCE", 0.01)
    model = tiny("qwen3")
    alone = decode(model, ROWS[0])
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as pool:
        with slow_fast(model, None, SMALL):
            waiting = pool.submit(decode, model, ROWS[0])
            while not caplog.records:
                pass
        assert waiting.result(60) == alone
    assert "another thread has this model under sfi" in caplog.text
