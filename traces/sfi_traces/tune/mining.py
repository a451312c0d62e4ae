"""Ranks tokens by how far the support moves after them: candidates for a trigger set.

A token's movement is how much less than usual its step's support overlaps with those of the following steps,
the mean over lags, layers and heads. The sample is the token's occurrences. Its interval is Student's, at a
level that holds for all tokens together (Bonferroni).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sfi_traces.model.supports import Floats
from sfi_traces.replay import Supports
from sfi_traces.replay.replay import overlap_after, top
from sfi_traces.tune.trigger_sets import NamedSet

LEVEL = 0.95
LEAST = 3  # occurrences that an interval needs
MOST_RATE = 0.2  # most of the steps that a set's tokens may be, but for its first token


@dataclass(frozen=True, slots=True, kw_only=True)
class MinedToken:
    """A generated token, and how far the support moves after it.

    Attributes:
        count: Occurrences with enough steps after them; `rate` is their share of the steps.
        movement: Mean loss of overlap.
        low: Lower end of the mean's interval; None with too few occurrences, as is `high`.
    """

    token_id: int
    text: str
    count: int
    rate: float
    movement: float
    low: float | None
    high: float | None


def rank(recorded: Sequence[Supports], texts: Mapping[int, str], *, lags: int, budget: int) -> list[MinedToken]:
    """Rank the generated tokens by the lower end of their movement's interval.

    `lags` is how many steps after a token are looked at (trigger delay + 1 includes the refresh's own),
    `budget` how many most probable positions make up a step's support.
    """
    overlaps = [_overlaps(one, lags, budget) for one in recorded]
    usual_L = np.concatenate(overlaps).mean(0) if any(map(len, overlaps)) else np.zeros(lags)
    samples: dict[int, list[float]] = {}
    for supports, overlap_NL in zip(recorded, overlaps, strict=True):
        moved = (usual_L - overlap_NL).mean(1).tolist()
        # the last tokens have no steps after them
        for token, movement in zip(supports.tokens, moved, strict=False):
            samples.setdefault(token, []).append(movement)
    steps = sum(map(len, overlaps))
    tested = max(1, sum(len(values) >= LEAST for values in samples.values()))
    level = 1 - (1 - LEVEL) / tested
    found = [_mined(token, texts.get(token, ""), values, steps, level) for token, values in samples.items()]
    return sorted(found, key=lambda one: (one.low is None, -(one.low or 0), -one.movement))


def propose(tokens: Sequence[MinedToken], recorded: NamedSet) -> list[NamedSet]:
    """Make trigger sets of the tokens, in the order of `rank`, whose movement is significantly above 0.

    Returns "mined", and "mined+punctuation" united with `recorded`; nothing without such a token.
    """
    chosen: list[MinedToken] = []
    for one in tokens:
        if one.low is None or one.low <= 0:
            break
        if not chosen or sum(other.rate for other in chosen) + one.rate <= MOST_RATE:
            chosen.append(one)
    if not chosen:
        return []
    ids, texts = frozenset(one.token_id for one in chosen), tuple(one.text for one in chosen)
    mined = NamedSet(name="mined", token_ids=ids, texts=texts)
    both = replace(mined, name="mined+punctuation", token_ids=ids | recorded.token_ids)
    return [mined, both] if ids - recorded.token_ids else [mined]


def _overlaps(supports: Supports, lags: int, budget: int) -> Floats:
    # [N - lags, lags]: overlap of each step's support with the following ones
    strongest = _strongest(supports, budget)
    found = [
        overlap_after(strongest, step, strongest.position_NUK[step + 1 : step + 1 + lags]).mean(1)
        for step in range(supports.steps - lags)
    ]
    return np.array(found, np.float32).reshape(-1, lags)


def _strongest(supports: Supports, budget: int) -> Supports:
    N, U, K = supports.position_NUK.shape
    kept = top(supports.mass_NUK.reshape(N * U, K), budget).reshape(N, U, K)
    return replace(supports, position_NUK=np.where(kept, supports.position_NUK, np.int32(-1)))


def _mined(token: int, text: str, values: list[float], steps: int, level: float) -> MinedToken:
    from scipy.stats import t as student  # noqa: PLC0415 - comes with the extra

    n, mean = len(values), float(np.mean(values))
    half = None
    if n >= LEAST:
        half = float(student.ppf((1 + level) / 2, n - 1) * np.std(values, ddof=1)) / math.sqrt(n)
    return MinedToken(
        token_id=token,
        text=text,
        count=n,
        rate=n / steps,
        movement=mean,
        low=None if half is None else mean - half,
        high=None if half is None else mean + half,
    )
