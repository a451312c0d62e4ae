"""sfi's `correction` and `representatives`: which heads read everything, and what they select afterwards."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sfi_core.errors import ConfigError, InputError
from sfi_core.policies import SFI
from sfi_core.policies.head_clusters import HeadClusters
from sfi_core.settings.config import SfiConfig
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.selector import selector
from tests.watched import (
    LAYERS,
    H,
    Seen,
    Watched,
    assert_reads_counted,
    best_of,
    prompt_of,
    watched,
)

SINK, RECENT, BUDGET, T_MAX, NEW = 2, 5, 8, 4, 12
SOME = 0.1  # a threshold under which some cosines of a random model lie
PROMPTS = [prompt_of(length) for length in (41, 7, 1, 24)]
LEADERS = {0: (2, 1, 2, 1), 1: (1, 1, 1, 3)}
ALONE = {layer: tuple(range(H)) for layer in LAYERS}
CLUSTERS = HeadClusters(
    model_digest="",
    cluster_of={0: (0, 1, 0, 1), 1: (0, 0, 0, 1)},
    representatives={0: (2, 1), 1: (1, 3)},
)
CONFIG = SfiConfig().replace(
    slow_start=1, span=0, sink=SINK, recent=RECENT, budget=BUDGET, t_max=T_MAX, window_prefill=1,
    trigger_token_ids=(), selector={"alpha_cross": 6.0},
)  # fmt: skip
KINDS = [
    (SOME, False, "anchored"),
    (SOME, False, "sliding"),
    (None, True, "anchored"),
    (None, True, "sliding"),
    (SOME, True, "anchored"),
]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "heads.json"
    CLUSTERS.save(path)
    return path


@cache
def run(heads: Path, tau: float | None, clustered: bool, mode: str) -> Watched:
    source = str(heads) if clustered else None
    config = CONFIG.replace(correction=tau, representatives=source, recent_mode=mode)
    return watched(PROMPTS, config, "sfi", NEW)


def selected(
    seen: Seen, heads: Sequence[int], sink: int, stop: int, *, alone: bool
) -> dict[int, list[int]]:
    """Let the Selector rank J = [sink, stop) for some heads; alone is without Eq. 23."""
    settings = dataclasses.asdict(CONFIG.selector)
    if alone:
        settings["alpha_cross"] = 0.0
    logits = seen.logits_HGT[list(heads)][None, :, :, None]
    norm = seen.key_HTD[list(heads)].double().norm(dim=-1)[None]
    allowed = torch.zeros(1, seen.tokens, dtype=torch.bool)
    allowed[:, sink:stop] = True
    score, _ = selector(logits, norm, allowed, **settings)
    return {
        head: best_of(own, range(sink, stop), BUDGET)
        for head, own in zip(heads, score[0].tolist(), strict=True)
    }


class Rules:
    """What a layer of a request reads and selects, step by step, by the rules alone."""

    def __init__(self, leaders: Sequence[int], tau: float | None, mode: str, sink: int) -> None:
        self.leaders, self.tau, self.sliding, self.sink = leaders, tau, mode == "sliding", sink
        self.start, self.query = sink, {}
        self.chosen: dict[int, list[int]] = {head: [] for head in range(H)}

    def first(self, seen: Seen) -> None:
        """The prompt's last query selects."""
        self.start = self.recent(seen)
        self.refresh(seen)

    def recent(self, seen: Seen) -> int:
        return max(self.sink, seen.tokens - RECENT)

    def dense(self, seen: Seen) -> list[int]:
        """Representatives on slow steps; on fast ones the heads whose query has moved since it selected."""
        if seen.slow:
            return sorted(set(self.leaders))
        return [head for head in range(H) if self.moved(seen, head)]

    def moved(self, seen: Seen, head: int) -> bool:
        if self.tau is None or head not in self.query:
            return False
        now, last = seen.query_HGD[head].double(), self.query[head].double()
        return float(torch.cosine_similarity(now, last, -1).mean()) < self.tau

    def step(self, seen: Seen) -> tuple[list[int], list[Sequence[int]]]:
        """Return the heads that read everything, and what each head reads; select afterwards."""
        whole = self.dense(seen)
        start = self.recent(seen) if self.sliding else self.start
        sparse = [
            [*range(self.sink), *self.chosen[h], *range(start, seen.tokens)] for h in range(H)
        ]
        read = [range(seen.tokens) if h in whole else sparse[h] for h in range(H)]
        self.start = self.recent(seen) if seen.slow or self.sliding else self.start
        if seen.slow:
            self.refresh(seen)
        elif whole:
            self.chosen |= selected(seen, whole, self.sink, self.start, alone=True)
            self.query |= {head: seen.query_HGD[head] for head in whole}
        return whole, read

    def refresh(self, seen: Seen) -> None:
        if self.start > self.sink:
            chosen = sorted(set(self.leaders))
            own = selected(seen, chosen, self.sink, self.start, alone=False)
            self.chosen = {head: own[leader] for head, leader in enumerate(self.leaders)}
            self.query = dict(enumerate(seen.query_HGD))


def rules(request: int, layer: int, tau: float | None, clustered: bool, mode: str) -> Rules:
    leaders = LEADERS if clustered else ALONE
    return Rules(leaders[layer], tau, mode, min(SINK, len(PROMPTS[request])))


@pytest.mark.parametrize("request_", range(len(PROMPTS)))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_heads_read_everything_or_their_memory_as_the_rules_say(
    heads: Path, kind: Any, request_: int
):
    """What the attention returned; slow steps read with the memory of the last selection."""
    found, fully = run(heads, *kind), set()
    for layer in LAYERS:
        own, steps = rules(request_, layer, *kind), found.seen[request_, layer]
        own.first(steps[0])
        for now in steps[1:]:
            assert now.slow == (now.step % (T_MAX + 1) == 0)
            whole, read = own.step(now)
            now.assert_read(read)
            fully.add(len(whole))
    assert len(fully) > 1  # heads of one step differ, and steps do


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_selections_are_the_rules_and_say_why(heads: Path, kind: Any):
    found, reasons = run(heads, *kind), set()
    for request in range(len(PROMPTS)):
        told = {(e.step, e.layer): e for e in found.observer.selections if e.request == request}
        for layer in LAYERS:
            own, steps = rules(request, layer, *kind), found.seen[request, layer]
            own.first(steps[0])
            for now in steps[1:]:
                whole, _ = own.step(now)
                event = told.get((now.step, layer))
                assert (event is not None) == (now.slow or bool(whole))
                if event is None:
                    continue
                reasons.add(event.reason)
                assert event.reason == ("" if now.slow else "correction")
                changed = range(H) if now.slow else whole
                assert event.heads_H is None or event.heads_H.nonzero()[:, 0].tolist() == whole
                index = event.index_HK.tolist()
                assert [[j for j in index[h] if j >= 0] for h in changed] == [
                    own.chosen[h] for h in changed
                ]
    assert reasons == ({"", "correction"} if kind[0] is not None else {""})


def test_a_corrected_head_does_not_mind_what_the_others_select(heads: Path):
    """So that the test above tells a selection without Eq. 23 from one with it."""
    seen = run(heads, *KINDS[0]).seen[0, 1][3]
    alone, together = (selected(seen, range(H), SINK, 30, alone=how) for how in (True, False))
    assert alone != together
    one_by_one = [selected(seen, [head], SINK, 30, alone=True)[head] for head in range(H)]
    assert list(alone.values()) == one_by_one


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_reads_are_counted_as_the_positions_say(heads: Path, kind: Any):
    """A layer counts by its share of heads that read everything.

    Where a sliding window leaves fewer candidates than the budget, heads that have selected at different
    steps have memories of different sizes, and the count takes the largest.
    """
    found = run(heads, *kind)
    for request, prompt in enumerate(PROMPTS):
        if kind == (SOME, False, "sliding") and len(prompt) < SINK + BUDGET + RECENT:
            continue
        read = {}
        for layer in LAYERS:
            own, steps = rules(request, layer, *kind), found.seen[request, layer]
            own.first(steps[0])
            read |= {(now.step, layer): own.step(now)[1] for now in steps[1:]}
        assert_reads_counted(found, request, read)


@pytest.mark.parametrize("tau", [-1.5, 1.01])
def test_a_threshold_that_is_no_cosine_is_refused(tau: float):
    with pytest.raises(ConfigError, match=rf"correction must be .*, got {tau}"):
        CONFIG.replace(correction=tau)


def test_more_representatives_than_heads_are_refused():
    config = CONFIG.replace(representatives="even", synckv={"representatives": 5})
    with pytest.raises(ConfigError) as caught:
        watched([prompt_of(20)], config, "sfi", 3)
    assert str(caught.value) == f"representatives must be at most the layer's {H} KV heads, got 5"


def test_a_head_file_that_is_not_there_is_named(tmp_path: Path):
    config = CONFIG.replace(representatives=str(tmp_path / "none.json"))
    with pytest.raises(InputError, match=r"^head file .*none.json cannot be read: "):
        SFI(config, Trigger(frozenset(), config), LAYERS)
