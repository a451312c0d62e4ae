"""Tests whether mined trigger sets beat punctuation on held-out data.

On the mined part a set gets the T_max and gap with which it retains most, among those whose slow rate is no
higher than recorded punctuation's. On the held-out part its rival is punctuation at the same slow rate: the
best mixture, by time, of two of punctuation's own T_max and gaps, chosen on the held-out part itself, which
favors punctuation. The set wins if the interval of its gain in retained mass is above 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from sfi_core.measure.evaluation.statistics import bootstrap
from sfi_traces.model.supports import Floats
from sfi_traces.replay import Setting, StepMetrics, Supports, replay_request
from sfi_traces.tune.mining import MinedToken, propose, rank
from sfi_traces.tune.trigger_sets import NamedSet

SHARE = 0.6  # mined share of the requests, or of a single request's steps
T_MAX, GAPS = (8, 16, 32, 64, 128), (0, 4, 8, 16, 24)
BLOCK = 16  # steps; those that share a refresh are not independent
LEAST_BLOCKS = 5
DRAWS, SEED = 2000, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A proposed set against punctuation, on the held-out part.

    Attributes:
        t_max: Chosen on the mined part, as is `min_gap`.
        slow_rate: Share of slow steps; punctuation has the same, unless it cannot be so slow.
        difference: Mean retained mass over all steps, 1 at slow ones, less punctuation's.
        low: Lower end of the difference's interval; None if too little was held out.
        beats: Whether `low` is above 0.
    """

    name: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    t_max: int
    min_gap: int
    slow_rate: float
    difference: float
    low: float | None
    high: float | None
    interval_method: str | None
    beats: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Mined:
    """The result of mining.

    Attributes:
        tokens: The tokens of the mined part, ranked.
        verdicts: The proposals; empty if no token's movement is significant.
        better: The sets that beat punctuation.
        split: How the data was divided, in words.
    """

    tokens: list[MinedToken]
    verdicts: list[Verdict]
    better: list[NamedSet]
    split: str


def mine(recorded: Sequence[Supports], base: Setting, punctuation: NamedSet, texts: Mapping[int, str]) -> Mined:
    """Mine one part of some requests, and test the mined triggers against punctuation on the other part.

    `base` is the trace's own setting; its trigger delay says how many steps after a token count. `texts` are
    the tokens by id. Raises `TraceError` for a redacted trace.
    """
    config = base.config.replace(trigger_policy="boundary")
    base = replace(base, config=config, trigger_token_ids=punctuation.token_ids)
    first, rest, split = divide(recorded)
    tokens = rank(first, texts, lags=config.trigger_delay + 1, budget=config.budget)
    proposals = propose(tokens, punctuation)
    verdicts, better = [], []
    for one in proposals:
        verdict = _verdict(one, base, first, rest)
        if verdict is not None:
            verdicts.append(verdict)
            better += [one] if verdict.beats else []
    return Mined(tokens=tokens, verdicts=verdicts, better=better, split=split)


def divide(recorded: Sequence[Supports]) -> tuple[list[Supports], list[Supports], str]:
    """Return the mined part, the held-out part, and the division in words."""
    if len(recorded) > 1:
        count = min(len(recorded) - 1, max(1, round(SHARE * len(recorded))))
        words = f"{count} of {len(recorded)} requests mined, the others held out"
        return list(recorded[:count]), list(recorded[count:]), words
    (one,) = recorded
    count = max(1, round(SHARE * one.steps))
    words = f"{count} of {one.steps} steps mined, the others held out"
    rest = slice(min(count, one.steps - 1), None)  # as if the prompt had ended there
    return [one.at(slice(count))], [one.at(rest)], words


def _verdict(proposal: NamedSet, base: Setting, first: Sequence[Supports], rest: Sequence[Supports]) -> Verdict | None:
    limit = _slow_rate(_replayed(first, base))
    mined = replace(base, trigger_token_ids=proposal.token_ids, triggers=proposal.name)
    tuned = max(
        (
            (_mean_kept(metrics), setting)
            for setting in _grid(mined)
            if _slow_rate(metrics := _replayed(first, setting)) <= limit
        ),
        key=lambda pair: pair[0],
        default=None,
    )
    if tuned is None:
        return None
    setting = tuned[1]
    new = _replayed(rest, setting)
    rivals = [_replayed(rest, one) for one in _grid(base)]
    differences = [_kept(one) - other for one, other in zip(new, mixture(rivals, _slow_rate(new)), strict=True)]
    pooled = np.concatenate(differences)
    low, high, method = interval(differences)
    return Verdict(
        name=proposal.name,
        tokens=proposal.texts,
        token_ids=tuple(sorted(proposal.token_ids)),
        t_max=setting.config.t_max,
        min_gap=setting.config.min_gap,
        slow_rate=_slow_rate(new),
        difference=float(pooled.mean()) if len(pooled) else 0.0,
        low=low,
        high=high,
        interval_method=method,
        beats=low is not None and low > 0,
    )


def _grid(setting: Setting) -> list[Setting]:
    # the same triggers with other T_max and gaps, and with no slow step at all
    config = setting.config
    pairs = product(sorted({*T_MAX, config.t_max}), sorted({*GAPS, config.min_gap}))
    configs = [config.replace(t_max=t_max, min_gap=gap) for t_max, gap in pairs]
    return [replace(setting, config=one) for one in (*configs, config.replace(trigger_policy="never"))]


def mixture(rivals: Sequence[Sequence[StepMetrics]], rate: float) -> list[Floats]:
    """Mix the two rivals that retain most at a slow rate, in proportion; return retained mass by request."""
    points = [(_slow_rate(one), _mean_kept(one), one) for one in rivals]
    best: tuple[float, float, Any, Any] | None = None
    for low, high in product(points, points):
        if low[0] > rate or (high is not low and high[0] < rate):
            continue
        share = (rate - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
        kept = (1 - share) * low[1] + share * high[1]
        if best is None or kept > best[0]:
            best = kept, share, low[2], high[2]
    assert best is not None, "without slow steps the rate is 0"
    _, share, low_metrics, high_metrics = best
    return [
        (1 - share) * _kept(one) + share * _kept(other) for one, other in zip(low_metrics, high_metrics, strict=True)
    ]


def _mean_kept(metrics: Sequence[StepMetrics]) -> float:
    kept_N = np.concatenate([_kept(one) for one in metrics])
    return float(kept_N.mean()) if len(kept_N) else 1.0


def _replayed(recorded: Sequence[Supports], setting: Setting) -> list[StepMetrics]:
    return [replay_request(one, setting) for one in recorded]


def _slow_rate(metrics: Sequence[StepMetrics]) -> float:
    slow_N = np.concatenate([one.slow_N[1:] for one in metrics])
    return float(slow_N.mean()) if len(slow_N) else 0.0


def _kept(metrics: StepMetrics) -> Floats:
    # retained mass of each decoding step, the mean over layers and heads; 1 where slow
    kept_N: Floats = metrics.lower_NU[1:].mean(1)
    return kept_N


def interval(differences: Sequence[Floats]) -> tuple[float, float, str] | tuple[None, None, None]:
    """Bootstrap the mean over several requests' steps, in blocks of consecutive ones.

    Returns both ends of the interval and its method; all None with too few blocks.
    """
    blocks = [one[start : start + BLOCK] for one in differences for start in range(0, len(one), BLOCK)]
    if len(blocks) < LEAST_BLOCKS:
        return None, None, None
    sums, counts = np.array([b.sum() for b in blocks]), np.array([len(b) for b in blocks])
    return bootstrap(
        [sums, counts], lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis), resamples=DRAWS, seed=SEED
    )
