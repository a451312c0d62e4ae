"""Which query of a verification selects: the last one, or the first."""

import torch

from sfi_core import SfiConfig, slow_fast
from sfi_core.engine.ledger import RequestPass
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.policies.base import Evidence, Selection
from tests.core.conftest import tiny_qwen3

PROMPT, BLOCK = 60, [5, 9, 7]


@torch.inference_mode()
def evidence_of(tokens: list[int], verified: list[int]) -> tuple[torch.Tensor, int]:
    """Return the first layer's evidence of a pass of `tokens`, [H, G, 1, T], and the tokens before it.

    `verified` are tokens whose keys lie behind the prompt already.
    """
    config = SfiConfig(trigger_token_ids=(1,), budget=8, recent=8, sink=2)
    found: list[torch.Tensor] = []

    def select_after(context: Evidence) -> Selection | None:
        found.append(context.logits())
        return None

    torch.manual_seed(0)
    model = tiny_qwen3()
    ids_BT = torch.arange(PROMPT)[None] % 50
    with slow_fast(model, None, config) as session:
        decoder = Decoder(session=session, ids_BT=ids_BT, mask_BT=torch.ones_like(ids_BT), capacity=PROMPT + 8)
        decoder.prefill()
        decoder.run.record([tokens[0]])
        run = session.run
        run.policy.select_after = select_after
        for block in (verified, tokens):
            if not block:
                continue
            found.clear()
            start = run.requests[0].length
            run.begin([RequestPass.decode("limit", len(block))])
            decoder.cache.see(start)
            decoder.drafting().planned_pass(run, block, range(start, start + len(block)))
            run.recorded = True
    return found[0][0], PROMPT + len(verified)


def test_the_evidence_is_that_of_the_last_query():
    """A query's logits in the first layer depend on its own token and on the keys before it."""
    several, _ = evidence_of(BLOCK, [])
    alone, _ = evidence_of(BLOCK[-1:], BLOCK[:-1])
    torch.testing.assert_close(several, alone)
    assert several.shape[-1] == PROMPT + len(BLOCK)
