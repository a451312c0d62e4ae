"""Replayed steps of every policy, on one device and over two tiers, are the eager ones."""

from dataclasses import replace

import pytest
import torch

from sfi_core.engine.attend import prepare_layers
from sfi_core.engine.graphs import steps
from sfi_core.policies import POLICIES, Evidence, EvidencePolicy, Selection, Triggered, best
from sfi_core.policies.built_in import codescan
from tests.covering import case, first
from tests.fake_graph import Tape
from tests.replays import CONFIG, EVERY_STEP, PROMPTS, same, told

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors; test_on_a_gpu.py has the real thing")


class Loudest(EvidencePolicy, Triggered):
    def select_after(self, context: Evidence) -> Selection:
        return best(context, context.probability().amax(dim=(2, 3)), self.config.budget)


def test_a_policy_sees_its_request_s_tokens_and_none_behind_them(complete, monkeypatch):
    """The logits there are undefined: others' are longer, and a recorded step has room for all to come."""
    monkeypatch.setitem(POLICIES, "loudest", Loudest)
    options = {"policy": "loudest", "max_new_tokens": 7}
    (_, among), (_, alone) = (
        complete(how, prompts=some, **options) for how, some in ((True, PROMPTS[:2]), (False, PROMPTS[1:2]))
    )
    chosen = {key[:2]: heads for key, heads in told(among)[2].items() if key[2] == 1}
    assert chosen == {key[:2]: heads for key, heads in told(alone)[2].items()}
    assert len(chosen) > 2  # there is a slow step after the prompt's


@pytest.mark.parametrize("policy", ["full-kv", "streaming-llm", "snapkv", "prior-only"])
def test_other_policies_can_be_replayed(complete, recorder, policy):
    options = {"policy": policy, "max_new_tokens": 6, "prompts": PROMPTS[1:3]}
    same(complete(True, **options), complete(False, **options))
    assert recorder.tapes == {"prior-only": 2}.get(policy, 1)


@pytest.mark.parametrize(
    "policy", first(["sfi", "freekv", "snapkv", "streaming-llm", "codescan", "quest", "synckv"], 3)
)
def test_steps_over_two_tiers_can_be_replayed(complete, recorder, policy):
    """Tokens and records are those of eager steps and of a cache on the device; so are the bytes over the link."""
    prompts = [[7 * token % 96 for token in range(length)] for length in (150, 90)]
    options = {
        "policy": policy, "config": EVERY_STEP.replace(recent=16, budget=4), "max_new_tokens": 8, "prompts": prompts
    }  # fmt: skip
    if policy in ("codescan", "freekv", "quest"):
        options |= {"name": "small", "prompts": PROMPTS[:2], "max_new_tokens": 5}
    tiers = "70kB" if policy in ("sfi", "snapkv", "streaming-llm") else "1MB"  # without room for a layer
    graphed, eager = (complete(graphs, tiers=tiers, **options) for graphs in (True, False))
    whole = complete(False, **options)
    tapes, recalls = (
        recorder.tapes,
        [
            [(e.step, e.request, e.layer, e.rows_H.tolist(), e.row_bytes) for e in heard.recalls]
            for _, heard in (graphed, eager)
        ],
    )
    assert sorted(recalls[0]) == sorted(recalls[1])
    same(graphed, eager)
    assert [r.token_ids for r in graphed[0].requests] == [r.token_ids for r in whole[0].requests]
    assert told(graphed[1]) == told(whole[1])
    ours, theirs = (replace(report.kv_tiers, recall_seconds=0) for report, _ in (graphed, eager))
    assert ours == theirs
    assert (ours.recalled_bytes > 0) == (policy not in ("snapkv", "streaming-llm"))
    assert tapes > 0


@pytest.mark.exhaustive
def test_the_choice_of_a_step_can_be_replayed(complete, recorder, monkeypatch):
    """With the kernels that choose. Before the third replay, and without waiting for the device, the second
    prompt learns its first basis; the first one learns its own again before the fourth."""
    learned = []

    def learn(run, *about) -> None:
        with recorder.refusing(Tape(host=True)) as tape:
            prepare_layers(run, *about)
        if tape.played:
            learned.append((sorted(run.kept), recorder.plays))

    monkeypatch.setattr(steps, "prepare_layers", learn)
    monkeypatch.setattr(codescan, "RELEARN", 3)
    options = {"policy": "codescan", "max_new_tokens": 6, "prompts": [PROMPTS[0], PROMPTS[2][:5]], "name": "small"}
    config = CONFIG.replace(budget=2, recent=3)
    eager, graphed = (complete(graphs, config=config, **options) for graphs in (False, True))
    assert graphed[0].paths["graph.replay"] == 5
    same(graphed, eager)
    assert recorder.tapes == 1
    assert learned == [([0], plays) for plays in (2, 3)]


BATCHES = {
    "one": {"prompts": PROMPTS[2:3], "max_new_tokens": 8},
    "joining": {"prompts": PROMPTS[1:], "max_batch": 2, "max_new_tokens": [3, 6, 3]},
}


@pytest.mark.parametrize(
    ("policy", "batch"),
    [
        case(policy, batch, kept=batch == "joining" or policy == "synckv")  # whose slow steps come twice alone
        for policy in ("quest", "freekv", "synckv", "oracle-top-k")
        for batch in BATCHES
    ],
)
def test_policies_that_choose_at_every_step_can_be_replayed(complete, recorder, policy, batch):
    """With the kernels that score and choose pages. Where a request joins, a step that was launched is done again."""
    options = {"config": EVERY_STEP, "policy": policy, "name": "small", **BATCHES[batch]}
    eager, graphed = complete(False, **options), complete(True, **options)
    ahead = graphed[0].paths.get("graph.ahead", 0)
    same(graphed, eager)
    assert ahead > 0
    assert recorder.plays > ahead
    corrected = [e.heads_H for e in eager[1].selections if e.reason == "correction"]
    assert not corrected or 0 < int(torch.stack(corrected).sum()) < torch.stack(corrected).numel()
    assert bool(corrected) is (policy == "freekv")
    assert recorder.tapes == 1 + (policy == "synckv" and batch == "one")  # slow steps, where they come twice
