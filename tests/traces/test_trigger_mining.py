"""Trigger mining: what moves the support is found, noise is not, and only what holds up is claimed."""

import math
import random

import numpy as np
import pytest
from scipy.stats import t as student

from sfi_core.settings.config import SfiConfig
from sfi_traces.model.trace import Trace
from sfi_traces.replay import Setting, Supports, replay_request
from sfi_traces.tune.held_out import BLOCK, divide, interval, mine, mixture
from sfi_traces.tune.mining import MinedToken, propose, rank
from sfi_traces.tune.trigger_sets import NamedSet, recorded_set
from sfi_traces.tune.tuning import Tuning
from tests.traces.made import MODEL, STOP, make_trace
from tests.traces.small import redact

MOVER, CONTEXT, PAIRS, TOP = 7, 400, 4, 24
TEXTS = {MOVER: " so", STOP: "."}


def made(seed: int, *, steps: int = 400, movers=(MOVER,), request: int = 0) -> Supports:
    """A full stop every ten steps, a mover now and then; supports jump two steps after a mover."""
    rng = random.Random(seed)
    tokens = [STOP if t % 10 == 9 else MOVER if rng.random() < 0.05 else rng.randrange(10, 40) for t in range(steps)]
    position = np.zeros((steps, PAIRS, TOP), np.int32)
    mass = np.zeros((steps, PAIRS, TOP), np.float32)
    tops: list[list[int]] = [[] for _ in range(PAIRS)]
    for t in range(steps):
        jumps = t >= 2 and tokens[t - 2] in movers
        for unit in range(PAIRS):
            kept = rng.sample(tops[unit], TOP - (20 if jumps else rng.randint(0, 1))) if t else []
            free = sorted(set(range(4, CONTEXT)) - set(kept))
            tops[unit] = sorted(kept + rng.sample(free, TOP - len(kept)))
            raw = [rng.random() + 0.2 for _ in range(TOP)]
            position[t, unit] = tops[unit]
            mass[t, unit] = np.array(raw) / sum(raw) * 0.9
    return Supports(
        request=request, model=MODEL, top=TOP, tokens=tokens, step_N=np.arange(steps),
        length_N=np.arange(CONTEXT, CONTEXT + steps),
        layer_U=np.array([0, 0, 1, 1]), head_U=np.array([0, 1, 0, 1]), position_NUK=position, mass_NUK=mass,
    )  # fmt: skip


@pytest.fixture(scope="module")
def moving() -> Supports:
    return made(0, steps=800)


def setting(**changes) -> Setting:
    rules = {"sink": 4, "recent": 16, "budget": TOP, "t_max": 64, "trigger_delay": 1, **changes}
    return Setting(
        config=SfiConfig(slow_start=1, min_gap=0, span=0).replace(**rules), trigger_token_ids=frozenset({STOP})
    )


def mined(*recorded: Supports, base: Setting | None = None):
    base = base or setting()
    return mine(recorded, base, recorded_set(base), TEXTS)


def test_the_token_that_moves_the_support_comes_first(moving):
    first, second, *_ = rank([moving], TEXTS, lags=2, budget=TOP)
    assert (first.token_id, first.text) == (MOVER, " so")
    assert first.count == sum(token == MOVER for token in moving.tokens[:-2])
    assert first.rate == first.count / 798
    assert 0 < first.low < first.movement < first.high
    assert second.low < 0


def test_movement_is_by_how_much_less_than_usual_the_supports_overlap(moving):
    """Written out with sets."""
    sets = [[set(row.tolist()) for row in step] for step in moving.position_NUK]
    overlap = {
        (t, lag): np.mean([len(a & b) / TOP for a, b in zip(sets[t], sets[t + lag], strict=True)])
        for t in range(798)
        for lag in (1, 2)
    }
    usual = {lag: np.mean([overlap[t, lag] for t in range(798)]) for lag in (1, 2)}
    at = [t for t in range(798) if moving.tokens[t] == MOVER]
    expected = [np.mean([usual[lag] - overlap[t, lag] for lag in (1, 2)]) for t in at]
    first = rank([moving], TEXTS, lags=2, budget=TOP)[0]
    assert first.movement == pytest.approx(np.mean(expected), abs=1e-6)
    tested = len({t for t in moving.tokens if moving.tokens[:798].count(t) >= 3})
    half = student.ppf(1 - 0.025 / tested, len(at) - 1) * np.std(expected, ddof=1) / math.sqrt(len(at))
    assert first.high - first.low == pytest.approx(2 * half, rel=1e-4)


def test_what_moves_the_support_beats_punctuation_on_what_was_held_out(moving):
    found = mined(moving)
    assert found.split == "480 of 800 steps mined, the others held out"
    (verdict, both) = found.verdicts
    assert (verdict.name, verdict.tokens, verdict.token_ids) == ("mined", (" so",), (MOVER,))
    assert verdict.beats
    assert 0 < verdict.low < verdict.difference < verdict.high
    assert both.token_ids == (MOVER, STOP)
    assert found.better[0].token_ids == {MOVER}


def test_nothing_is_claimed_of_noise():
    """The supports drift alike after every token; of 20 such runs a 95 % level may err in one or two."""
    proposals, better = 0, 0
    for seed in range(20):
        found = mined(made(seed, steps=160, movers=()))
        proposals += bool(found.verdicts)
        better += bool(found.better)
    assert proposals <= 2
    assert better == 0


def token(token_id: int, low: float | None, rate: float) -> MinedToken:
    return MinedToken(token_id=token_id, text=str(token_id), count=9, rate=rate, movement=0.1, low=low, high=0.2)


def test_proposals_take_the_surest_tokens_up_to_a_rate():
    stops = NamedSet(name="recorded", token_ids=frozenset({99}))
    ranked = [token(1, 0.3, 0.1), token(2, 0.2, 0.15), token(3, 0.1, 0.05), token(4, 0.0, 0.01)]
    one, both = propose(ranked, stops)
    assert (one.token_ids, one.texts) == ({1, 3}, ("1", "3"))
    assert both.token_ids == {1, 3, 99}
    assert propose([token(1, 0.1, 0.9)], stops)[0].token_ids == {1}
    assert propose([token(1, None, 0.1), token(2, -0.1, 0.1)], stops) == []
    assert [one.name for one in propose([token(99, 0.1, 0.1)], stops)] == ["mined"]


def test_what_is_mined_and_what_is_held_out_do_not_meet(moving):
    (first,), (rest,), _ = divide([moving])
    assert first.tokens + rest.tokens == moving.tokens
    assert rest.prompt_tokens == CONTEXT + 480
    assert (rest.mass_NUK == moving.mass_NUK[480:]).all()


def test_the_interval_of_a_difference_takes_blocks_whole():
    constant = [np.full(BLOCK * 6, 0.25, np.float32)]
    assert interval(constant) == (0.25, 0.25, "percentile")
    assert interval([np.ones(BLOCK * 4, np.float32)]) == (None, None, None)
    rng = np.random.default_rng(0)
    steps = np.repeat(rng.normal(size=40), BLOCK).astype(np.float32)  # a block is one sample
    low, high, method = interval([steps])
    assert method == "BCa"
    assert (high - low) / 2 == pytest.approx(1.96 * steps[::BLOCK].std() / math.sqrt(40), rel=0.15)


def test_a_redacted_trace_is_not_mined(tmp_path):
    path = make_trace(tmp_path / "t", requests=2)
    tuning = Tuning.of([Trace.open(path)], axes={}, trigger_sets={}, objectives={}, limits=None)
    # of made-up tokens none but the full stop comes up more than twice
    assert tuning.mined.better == []
    assert set(tuning.space.sets) == {"recorded"}
    redact(path)
    assert Tuning.of([Trace.open(path)], axes={}, trigger_sets={}, objectives={}, limits=None).mined is None


def test_punctuation_is_mixed_to_the_set_s_own_slow_rate(moving):
    """Half the way between two slow rates a mixture keeps half the way between what they keep."""
    few, many = ([replay_request(moving, setting(trigger_policy="stride", stride=stride))] for stride in (20, 10))
    rates = [float(one[0].slow_N[1:].mean()) for one in (few, many)]
    kept = [one[0].lower_NU[1:].mean(1) for one in (few, many)]
    (mixed,) = mixture([few, many], sum(rates) / 2)
    assert mixed == pytest.approx((kept[0] + kept[1]) / 2, abs=1e-6)
    assert mixture([few, many], rates[0])[0] == pytest.approx(kept[0], abs=1e-6)
    assert mixture([few, many], 1.0)[0] == pytest.approx(kept[1], abs=1e-6)
