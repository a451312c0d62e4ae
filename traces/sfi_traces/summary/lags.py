"""Overlap of the supports of two steps by how far apart they are, and the colors of a map of it."""

from dataclasses import dataclass

import numpy as np

from sfi_traces.model.supports import MOST_STEPS, Supports

MOST_LAG = 128
SPREAD = (0.1, 0.9)  # quantiles of a band


def color_range(overlap: np.ndarray) -> tuple[float, float]:
    """Choose a color scale: tenths around all overlaps except those of a step with itself."""
    others = overlap[~np.eye(len(overlap), dtype=bool)]
    if not len(others):
        return 0.0, 1.0
    return float(np.floor(others.min() * 10) / 10), float(np.ceil(others.max() * 10) / 10)


def axis_range(*values: np.ndarray) -> tuple[float, float]:
    """Choose the ends of an axis of overlaps: a little beyond all values, within 0 and 1."""
    known = np.concatenate(values)
    low, high = float(known.min()), float(known.max())
    room = max(0.02, 0.06 * (high - low))
    return max(0.0, low - room), min(1.0, high + room)


@dataclass(frozen=True, slots=True)
class LagLine:
    """Overlap of pairs of steps by `lag`: mean, 10 and 90 % quantiles, number of pairs."""

    name: str
    lag: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    pairs: np.ndarray

    @property
    def overall(self) -> float:
        """Mean overlap of all pairs; NaN where there is none."""
        pairs = self.pairs.sum()
        return float((self.mean * self.pairs).sum() / pairs) if pairs else float("nan")


def overlap_by_lag(supports: Supports, sentence: np.ndarray, most: int = MOST_LAG) -> tuple[LagLine, LagLine]:
    """Sort pairs of steps by lag, up to `most`: first within a sentence, then across a boundary.

    A pair's overlap is the mean over layers and KV heads; `sentence` has each step's sentence.
    """
    pieces = []
    # stretches overlap by `most` steps, so that each pair lies within one
    for begin in range(0, supports.steps, MOST_STEPS):
        part = supports.at(slice(begin, begin + MOST_STEPS + most))
        lag = part.step_N[None] - part.step_N[:, None]
        wanted = (lag > 0) & (lag <= most)
        wanted[MOST_STEPS:] = False  # their pairs come with the next stretch
        inside = sentence[begin : begin + MOST_STEPS + most]
        same = inside[None] == inside[:, None]
        pieces.append((part.overlap[wanted], lag[wanted], same[wanted]))
    value, lag, same = (np.concatenate(each) for each in zip(*pieces, strict=True))
    return (_line("within a sentence", value[same], lag[same]), _line("across a boundary", value[~same], lag[~same]))


def _line(name: str, value: np.ndarray, lag: np.ndarray) -> LagLine:
    order = np.argsort(lag, kind="stable")
    value, lag = value[order].astype(np.float64), lag[order]
    lags, first, pairs = np.unique(lag, return_index=True, return_counts=True)
    groups = np.split(value, first[1:]) if len(lags) else []
    low, high = (np.array([np.quantile(group, share) for group in groups]) for share in SPREAD)
    return LagLine(name, lags, np.array([group.mean() for group in groups]), low, high, pairs)
