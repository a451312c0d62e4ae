"""Drafts of a lossless run that stay on the device until they are verified, replayed from a tape."""

import pytest
import torch

from sfi_core import Sampling
from sfi_core.engine.lossless import Drafts
from sfi_core.engine.picking import Picker
from sfi_core.settings.config import DraftConfig
from tests.covering import first
from tests.fake_graph import LOOKS
from tests.replays import CONFIG, PROMPTS, told

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors")

DRAFTED = CONFIG.replace(draft=DraftConfig(max_tokens=5, adaptive=False), baseline={"page": 4}, t_max=9)
T_MAX, ENDS = (DRAFTED.replace(trigger_policy=policy, trigger_delay=1) for policy in ("t-max", "boundary"))
PAIR = {"prompts": [PROMPTS[0][:20], PROMPTS[2]], "stop_token_ids": range(1, 96, 9), "max_new_tokens": 9}
CHAINED = {
    "sampled, waiting": {
        "config": T_MAX, "policy": "sfi", "prompts": PROMPTS[1:], "max_batch": 2, "max_new_tokens": 20, "seed": 3,
        "stop_token_ids": range(0, 96, 13),
        "sampling": [Sampling(temperature=1.0), Sampling(), Sampling(temperature=2.0)],
    },
    "a sentence end decides": {
        "config": ENDS.replace(trigger_token_ids=tuple(range(0, 96, 9))), "policy": "sfi", "prompts": PROMPTS[1:],
        "stop_token_ids": range(5, 96, 11), "max_new_tokens": 24,
    },
    "codescan": {"config": ENDS, "policy": "codescan", "name": "small", **PAIR},
    "quest": {"config": ENDS, "policy": "quest", "name": "small", **PAIR},
}  # fmt: skip


@pytest.mark.parametrize("case", first(CHAINED, 2))
def test_a_draft_is_read_when_it_is_verified(complete, monkeypatch, case):
    """Not before, but one step late where a sentence end decides. What is drafted behind a stop token never was."""
    drafting, looks, behind, drawn = False, 0, list[int](), []

    def plan(drafts, plan=Drafts.plan) -> list:
        nonlocal drafting
        blocks = plan(drafts)
        drafting = not any(block and block.reason for block in blocks)
        return blocks

    def draw(picker, *about, draw=Picker.draw):
        drawn.append(draw(picker, *about))
        return drawn[-1]

    def read(picker, picks, read=Picker.read) -> list[int]:
        if drafting and picks in drawn:
            behind.append(len(drawn) - 1 - drawn.index(picks))
        return read(picker, picks)

    def watched(look):
        def watch(tensor, *more):
            nonlocal looks
            looks += drafting
            return look(tensor, *more)

        return watch

    for owner, method in ((Drafts, plan), (Picker, draw), (Picker, read)):
        monkeypatch.setattr(owner, method.__name__, method)
    eager, expected = complete(False, lossless=True, **CHAINED[case])
    behind.clear()
    for look in (*LOOKS, "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, look, watched(getattr(torch.Tensor, look)))
    graphed, heard = complete(True, lossless=True, **CHAINED[case])
    assert looks == len(behind)
    assert set(behind) == ({1} if case == "a sentence end decides" else set())
    assert len(heard.begun) > len(expected.begun), "something was drafted behind a stop token"
    for name in ("token_ids", "lossless", "reasons"):
        assert [getattr(r, name) for r in graphed.requests] == [getattr(r, name) for r in eager.requests]
    (steps_of, _, chosen), (wanted, _, selected) = told(heard), told(expected)
    assert sorted(steps_of, key=lambda step: step[1]) == sorted(wanted, key=lambda step: step[1])
    assert chosen == selected
