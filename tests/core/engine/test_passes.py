"""Passes in which each request reads or decodes in a way of its own, and which query of a verification selects."""

import pytest
import torch

from sfi_core import SfiConfig, slow_fast
from sfi_core.engine.attend import attend
from sfi_core.engine.ledger import RequestPass
from sfi_core.engine.run import Run
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.policies.built_in.sfi import SFI
from sfi_core.state.kv_cache import KVCache
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.step_descriptor import PROMPT, SLOW
from tests.core.conftest import tiny_qwen3
from tests.covering import first
from tests.fakes import RecordingObserver

H, G, D, PAGE, CAPACITY = 2, 2, 16, 16, 64
CONFIG = SfiConfig(sink=2, recent=4, budget=6, window_prefill=4, span=0, trigger_token_ids=(1,))
FAST_STEP, SLOW_STEP = (RequestPass.decode(reason) for reason in ("", "t_max"))
REST = RequestPass()


class Driven:
    """Runs passes over random keys; request r is made of seed r, whatever its row."""

    def __init__(self, *requests: int, backend: str = "torch") -> None:
        policy = SFI(CONFIG, Trigger(frozenset({1}), CONFIG))
        store = KVCache(len(requests), CAPACITY, PAGE, backend)
        self.seen = RecordingObserver()
        self.run = Run(policy, self.seen, store)
        self.data = [
            torch.randn(3, H, G, CAPACITY, D, generator=torch.Generator().manual_seed(request)) for request in requests
        ]

    def go(self, *passes: RequestPass) -> list[torch.Tensor]:
        """Run a pass and note its tokens; return what each request read, [H, G, count, D]."""
        T = max(request_pass.count for request_pass in passes)
        key, value, query = (torch.zeros(len(passes), H, G, T, D) for _ in range(3))
        for row, request_pass in enumerate(passes):
            start = self.run.requests[row].length
            tensors = self.data[row][:, :, :, start : start + request_pass.count]
            for target, drawn in zip((key, value, query), tensors, strict=True):
                target[row, :, :, T - request_pass.count :] = drawn
        self.run.begin(passes)
        self.run.append(0, key[:, :, 0], value[:, :, 0])
        out = attend(self.run, 0, query, scale=D**-0.5)
        self.run.maintenance.join()
        self.run.record([5] * len(passes))
        return [out[row, :, :, T - request_pass.count :] for row, request_pass in enumerate(passes)]

    def packed(self, row: int) -> list[list[int]]:
        return self.run.segment(0).position_BHS[row].tolist()


def prompt(count: int, *, ends: bool = True) -> RequestPass:
    return RequestPass.prompt(count, ends=ends)


PASSES = (  # of three requests: prompts of 20, 33 and 23 tokens in pieces, and steps of both kinds
    (REST, prompt(13, ends=False), prompt(3, ends=False)),
    (prompt(17, ends=False),) * 3,
    (prompt(3),) * 3,  # fewer than the first selection has queries
    (FAST_STEP, SLOW_STEP, FAST_STEP),
    (FAST_STEP, FAST_STEP, SLOW_STEP),
    (SLOW_STEP, REST, FAST_STEP),
)


@pytest.mark.parametrize("backend", first(["torch", "triton"]))
def test_each_request_of_a_pass_does_what_it_does_alone(backend: str):
    together = Driven(0, 1, 2, backend=backend)
    alone = [Driven(request, backend=backend) for request in range(3)]
    for passes in PASSES:
        read = together.go(*passes)
        for row, (driven, request_pass) in enumerate(zip(alone, passes, strict=True)):
            if request_pass.count:
                torch.testing.assert_close(read[row], driven.go(request_pass)[0], rtol=1e-5, atol=1e-6)
                assert together.packed(row) == driven.packed(0)
    for row, driven in enumerate(alone):
        ours, theirs = together.run.requests[row], driven.run.requests[0]
        assert ours.tokens == theirs.tokens
        assert ours.tally.slow_at == theirs.tally.slow_at
        assert ours.recent_start == theirs.recent_start
    assert together.run.meter.paths == sum((d.run.meter.paths for d in alone), start=type(together.run.meter.paths)())


def test_a_piece_gives_no_token_before_the_last():
    driven = Driven(0, 1)
    driven.go(prompt(20, ends=False), REST)
    assert not driven.seen.steps
    driven.go(prompt(8), prompt(8))
    assert [state.tokens for state in driven.run.requests] == [[5], [5]]
    assert [event.request for event in driven.seen.steps] == [0, 1]


def test_a_slow_request_may_bring_several_tokens():
    """As a verification of drafted tokens does: causal among them, and the last one selects."""
    several, single = Driven(0), Driven(0)
    for driven in (several, single):
        driven.go(prompt(20))
    out = several.go(RequestPass(SLOW, 3, "t_max"))[0]
    one_by_one = torch.cat([single.go(SLOW_STEP)[0] for _ in range(3)], 2)
    torch.testing.assert_close(out, one_by_one, rtol=1e-5, atol=1e-6)
    assert several.packed(0) == single.packed(0)


@pytest.mark.parametrize(
    ("passes", "rule"),
    [((FAST_STEP, prompt(3)), "passes of their own"), ((prompt(3, ends=False), prompt(3)), "together")],
)
def test_prompts_are_read_to_one_end_and_while_none_decodes(passes: tuple[RequestPass, ...], rule: str):
    driven = Driven(0, 1)
    driven.go(prompt(20), prompt(8))
    with pytest.raises(AssertionError, match=rule):
        driven.go(*passes)


def test_a_pass_says_what_it_is():
    assert prompt(3).kind == PROMPT
    assert prompt(0) == REST
    assert [request_pass.generates for request_pass in (REST, prompt(3, ends=False), prompt(3), FAST_STEP)] == [
        False,
        False,
        True,
        True,
    ]


LONG, BLOCK = 60, [5, 9, 7]


@torch.inference_mode()
def evidence_of(tokens: list[int], verified: list[int]) -> tuple[torch.Tensor, int]:
    """Return the first layer's evidence of a pass of tokens behind verified ones, and the tokens before it."""
    config = SfiConfig(trigger_token_ids=(1,), budget=8, recent=8, sink=2)
    evidence: list[torch.Tensor] = []

    def select_after(context):
        evidence.append(context.logits())

    torch.manual_seed(0)
    model = tiny_qwen3()
    ids_BT = torch.arange(LONG)[None] % 50
    with slow_fast(model, None, config) as session:
        decoder = Decoder(session=session, ids_BT=ids_BT, mask_BT=torch.ones_like(ids_BT), capacity=LONG + 8)
        decoder.prefill()
        decoder.run.record([tokens[0]])
        run = session.run
        run.policy.select_after = select_after
        for block in (verified, tokens):
            if not block:
                continue
            evidence.clear()
            start = run.requests[0].length
            run.begin([RequestPass.decode("limit", len(block))])
            decoder.cache.see(start)
            decoder.drafting().planned_pass(run, block, range(start, start + len(block)))
            run.recorded = True
    return evidence[0][0], LONG + len(verified)


def test_the_evidence_is_that_of_the_last_query():
    """A query's logits in the first layer depend on its own token and on the keys before it."""
    several, _ = evidence_of(BLOCK, [])
    alone, _ = evidence_of(BLOCK[-1:], BLOCK[:-1])
    torch.testing.assert_close(several, alone)
    assert several.shape[-1] == LONG + len(BLOCK)
