"""SyncKV's rules (Sec. 4 and Algorithm 1), each from a run's own keys and queries."""

import math
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import torch

from sfi_core.engine.batch_pass import allowed_positions
from sfi_core.errors import ConfigError
from sfi_core.policies.base import Evidence
from sfi_core.policies.built_in.synckv import HeadClusters, LayerClusters, SyncKV
from sfi_core.settings.config import SfiConfig
from sfi_core.triggers.trigger import Trigger
from tests.fakes import int32
from tests.watched import LAYERS, H, Seen, Watched, assert_reads_counted, best_of, prompt_of, watched

SINK, RECENT, BUDGET, STRIDE, NEW = 2, 5, 10, 3, 12
PROMPTS = [prompt_of(length) for length in (41, 10, 7, 1)]
LEADERS = {0: (2, 1, 2, 1), 1: (1, 1, 1, 3)}
CLUSTERS = HeadClusters(
    digest="",
    layers={
        0: LayerClusters(cluster_of=(0, 1, 0, 1), representatives=(2, 1)),
        1: LayerClusters(cluster_of=(0, 0, 0, 1), representatives=(1, 3)),
    },
)
CONFIG = SfiConfig(slow_start=1, min_gap=0, span=0, sink=SINK, recent=RECENT, budget=BUDGET, trigger_policy="never")
KINDS = [("dense", 0.5), ("sparse", 0.5), ("dense", 0.0), ("sparse", 1.0), ("sparse", 0.9)]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "heads.json"
    path.write_text(CLUSTERS.text())
    return path


@cache
def run(heads: Path, suspension: str, rho: float) -> Watched:
    settings = {"heads": str(heads), "suspension": suspension, "static": rho, "stride": STRIDE}
    return watched(PROMPTS, CONFIG.replace(synckv=settings), "synckv", NEW)


def attention(seen: Seen, head: int) -> list[float]:
    """Eq. 5 over the head's whole history; the maximum over the query heads of a KV head (Appendix B.1)."""
    share = [query.softmax(-1).tolist() for query in seen.logits_HGT[head]]
    return [max(weights) for weights in zip(*share, strict=True)]


def sets_of_a_cluster(steps: list[Seen], leader: int, rho: float, sink: int) -> list[list[int]]:
    """I_S and I_D together after each step (Eqs. 3, 4 and 6; Algorithm 1, lines 15-16 and 26-35)."""
    most_static = BUDGET - math.floor((1 - Fraction(str(rho))) * BUDGET)
    static: list[int] = []
    rows: list[list[int]] = []
    for seen in steps:
        score, candidates = attention(seen, leader), range(sink, max(sink, seen.tokens - RECENT))
        if seen.step == 0:
            rows.append(best_of(score, candidates, BUDGET))
            static = best_of(score, candidates, most_static)
        elif seen.step % STRIDE:
            rows.append(rows[-1])
        else:
            spare = [j for j in candidates if j not in static]
            rows.append(sorted([*static, *best_of(score, spare, BUDGET - len(static))]))
    return rows


def reads(watch: Watched, request: int, layer: int, suspension: str, rho: float) -> list:
    """Say what each step's heads read (Algorithm 1, lines 22-24)."""
    steps, sink = watch.seen[request, layer], min(SINK, len(PROMPTS[request]))
    sets = {leader: sets_of_a_cluster(steps, leader, rho, sink) for leader in LEADERS[layer]}
    anticipated, rows = steps[0], []
    for now in steps[1:]:
        whole = suspension == "dense" or now.step % STRIDE == 0
        since = range(max(sink, anticipated.tokens - RECENT), now.tokens)
        rows.append(
            [
                range(now.tokens) if whole and head == leader else [*range(sink), *sets[leader][now.step - 1], *since]
                for head, leader in enumerate(LEADERS[layer])
            ]
        )
        anticipated = now if now.step % STRIDE == 0 else anticipated
    return rows


@pytest.mark.parametrize("request_", range(len(PROMPTS)))
@pytest.mark.parametrize(("suspension", "rho"), KINDS)
def test_heads_read_the_sets_that_their_representative_chose(heads: Path, suspension: str, rho: float, request_: int):
    """What the attention returned is attention to these positions, head by head and step by step."""
    watch = run(heads, suspension, rho)
    for layer in LAYERS:
        rows = reads(watch, request_, layer, suspension, rho)
        for now, read in zip(watch.seen[request_, layer][1:], rows, strict=True):
            now.assert_read(read)
            assert now.slow == (now.step % STRIDE == 0)


@pytest.mark.parametrize(("suspension", "rho"), KINDS)
def test_selections_are_the_static_and_the_dynamic_set(heads: Path, suspension: str, rho: float):
    """Every head's is its representative's; the prompt's last query and the anticipations select."""
    watch = run(heads, suspension, rho)
    for request, prompt in enumerate(PROMPTS):
        events = {(e.step, e.layer): e for e in watch.observer.selections if e.request == request}
        assert sorted(events) == [(t, layer) for t in range(0, NEW, STRIDE) for layer in LAYERS]
        for (step, layer), event in events.items():
            sink, steps = min(SINK, len(prompt)), watch.seen[request, layer]
            index = [[j for j in positions if j >= 0] for positions in event.index_HK.tolist()]
            expected = [sets_of_a_cluster(steps, leader, rho, sink)[step] for leader in LEADERS[layer]]
            assert index == expected, (step, layer)


def test_the_static_share_decides_what_changes(heads: Path):
    """So that the tests above see sets that move, and sets that stay."""
    moves = {}
    for suspension, rho in KINDS:
        chosen = [
            event.index_HK.tolist()
            for event in run(heads, suspension, rho).observer.selections
            if (event.request, event.layer) == (0, 1)
        ]
        moves[rho] = len({str(index) for index in chosen})
    assert moves[1.0] == 1
    assert min(moves[0.0], moves[0.5]) > 2


@pytest.mark.parametrize(("suspension", "rho"), KINDS[:2])
def test_reads_are_counted_as_the_positions_say(heads: Path, suspension: str, rho: float):
    """A layer counts by its share of heads that read everything."""
    watch = run(heads, suspension, rho)
    for request in range(len(PROMPTS)):
        read = {}
        for layer in LAYERS:
            rows = reads(watch, request, layer, suspension, rho)
            read |= {(step, layer): row for step, row in enumerate(rows, 1)}
        assert_reads_counted(watch, request, read)


def test_even_splits_neighbors_and_takes_each_group_s_first_head():
    by_heads = {heads: make("even").leaders(0, heads) for heads in (1, 3, 8, 14)}
    assert by_heads[1] == (0,)
    assert by_heads[3] == (0, 0, 0)
    assert by_heads[8] == (0, 0, 0, 0, 4, 4, 4, 4)
    assert by_heads[14] == (0,) * 5 + (5,) * 5 + (10,) * 4


def make(heads: str | None, **settings) -> SyncKV:
    config = CONFIG.replace(synckv={"heads": heads, **settings})
    return SyncKV(config, Trigger(frozenset(), config), LAYERS)


def test_what_lies_behind_a_shorter_request_takes_no_part(heads: Path):
    """The kernels write a request's own logits and leave the rest of the batch's width as it was."""
    logits, policy, page = 3 * torch.randn(2, H, 2, 1, 30), make(str(heads)), torch.empty(1, H, 1, 8)
    shown = {
        "layer": 0, "backend": "torch", "key_norm_BHT": torch.ones(2, H, 30), "length_B": int32([30, 22]),
        "allowed_BT": allowed_positions(30, torch.tensor([SINK] * 2), torch.tensor([25, 17])),
        "all_kept": policy.keeps(2, 2, page, page, 30), "request_B": int32([0, 1]),
    }  # fmt: skip
    spoilt = logits.clone()
    spoilt[1, ..., 22:] = torch.nan
    clean, selection = (
        policy.select_after(Evidence(logits=lambda evidence=evidence: evidence, **shown)).index_BHK
        for evidence in (logits.index_fill(4, torch.arange(22, 30), -torch.inf), spoilt)
    )
    assert torch.equal(selection[1], clean[1])
    assert bool((selection[1] >= 0).all())


def test_without_a_head_file_it_says_how_to_make_one():
    with pytest.raises(ConfigError, match=r"^synckv.heads must be .*, got none; .*`sfi tune heads`"):
        make(None)
