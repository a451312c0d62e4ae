"""When a draft is verified, how long it may grow, and what of it is kept."""

from dataclasses import replace

import pytest
import torch

from sfi_core.engine.lossless import Costs, DraftRule, best_length, until_stop
from sfi_core.hosts.transformers.cache import RaggedRow
from sfi_core.hosts.transformers.decoder import draft_cost
from sfi_core.machine.text import common_prefix
from sfi_core.settings.config import DraftConfig, SfiConfig
from sfi_core.sizes.step import ByteModel
from sfi_core.state.request import RequestState

STOP = 7
PLAIN = DraftConfig(max_tokens=4, adaptive=False)


def reason(config=PLAIN, *, tokens=(1, 2), drafted=1, room=50, planned="", **more):
    state = RequestState(tokens=list(tokens), drafted=drafted, **more)
    rule = DraftRule(config=config, stop_ids=frozenset([STOP]))
    return rule.reason(state, room, planned, rule.limit(state))


def test_a_draft_ends_for_one_reason():
    assert reason() == ""
    assert reason(fresh=False, planned="trigger") == "rejected"
    assert reason(planned="trigger", room=1) == "trigger"
    assert reason(room=2, drafted=1) == "room"
    assert reason(room=3, drafted=1) == ""
    assert reason(tokens=(1, STOP)) == "stop"
    assert reason(tokens=(STOP,), drafted=0) == ""
    assert reason(drafted=4) == "limit"
    assert reason(drafted=3) == ""


def share(cost):
    return Costs(cost, lambda _: 1.0)


def cycle(rate, cost, k):
    """Expected tokens over costs, by the chance of every outcome."""
    outcomes = [(rate**accepted * (1 - rate), accepted + 1) for accepted in range(k)] + [(rate**k, k + 1)]
    assert sum(chance for chance, _ in outcomes) == pytest.approx(1)
    return sum(chance * tokens for chance, tokens in outcomes) / (k * cost + 1)


@pytest.mark.parametrize("rate", [0.3, 0.8, 0.95, 0.999])
@pytest.mark.parametrize("cost", [0.05, 0.4, 0.95])
def test_no_other_length_gives_more_tokens_for_the_cost(rate, cost):
    best = best_length(rate, share(cost), 16)
    assert all(cycle(rate, cost, k) <= cycle(rate, cost, best) + 1e-12 for k in range(1, 17))


def test_rejections_shorten_drafts_and_dear_drafts_are_shorter():
    state = RequestState(length=1000, tokens=[1])
    rule = DraftRule(config=DraftConfig(), stop_ids=frozenset(), cost=lambda length, read: share(0.3))
    assert rule.limit(state) == 15
    state.tally.count_verification(15, 3)
    few = rule.limit(state)
    state.tally.count_verification(8, 0)
    assert rule.limit(state) < few < 15
    dear = DraftRule(config=DraftConfig(), stop_ids=frozenset(), cost=lambda length, read: share(0.9))
    assert dear.limit(state) < rule.limit(state)


def test_what_choosing_reads_makes_drafts_shorter():
    state = RequestState(length=1000, tokens=[1], packed_tokens=40, recent_start=1000)
    state.tally.count_verification(16, 12)
    rule = DraftRule(config=DraftConfig(), stop_ids=frozenset(), cost=lambda length, read: share(read / length))
    assert replace(rule, selecting=lambda request: request.length / 2).limit(state) < rule.limit(state)


def test_on_a_gpu_launches_and_tiles_of_queries_shorten_drafts():
    """Of Qwen3-0.6B at 8K, whose steps are mostly launches; of 4B at 8 x 32K, where 17 queries need a larger tile."""
    small = ByteModel(weight_bytes=1.2e9, batch=1, row_bytes=28 * 4096, heads=28 * 8, layers=28)
    large = ByteModel(weight_bytes=8e9, batch=8, row_bytes=36 * 4096, heads=36 * 8, layers=36)

    def longest(model, context, group, *, most=15, gpu=True):
        config = SfiConfig().replace(draft={"max_tokens": most})
        costs = draft_cost(model, config, group, refreshes=False, gpu=gpu)(context, 2308.0)
        return best_length(0.98, costs, most)

    assert longest(small, 8192, 2) < longest(small, 8192, 2, gpu=False)
    assert 8 < longest(large, 32768, 4) < longest(large, 32768, 4, gpu=False)
    assert longest(large, 32768, 4, most=16) == 8


def test_what_is_kept_ends_at_the_first_other_token_and_at_a_stop_token():
    assert common_prefix([4, 5, 6], [4, 5, 9, 9]) == 2
    assert common_prefix([4, 5, 6], [4, 5, 6, 9]) == 3
    assert common_prefix([4], [5, 4]) == 0
    assert common_prefix([], [3]) == 0
    assert until_stop([1, STOP, 3], frozenset([STOP])) == [1, STOP]
    assert until_stop([1, 2], frozenset([STOP])) == [1, 2]


def test_a_ragged_row_spreads_every_token_to_its_request_and_back():
    row = RaggedRow.of([2, 0, 1, 3], torch.device("cpu"))
    token_X = torch.arange(1.0, 7.0)
    batch_BHTD = row.padded(token_X.view(1, 1, 6, 1).expand(1, 2, 6, 3))
    assert batch_BHTD.shape == (4, 2, 3, 3)
    assert batch_BHTD[0, 1, 1:, 2].tolist() == [1, 2]
    assert batch_BHTD[2, 0, 2:, 0].tolist() == [3]
    assert batch_BHTD[3, 0, :, 1].tolist() == [4, 5, 6]
    joined = row.join(batch_BHTD[:, :, None])
    assert joined.shape == (1, 2, 1, 6, 3)
    assert joined[0, 1, 0, :, 2].tolist() == token_X.tolist()
