"""How much two supports share: measures of sets of sorted positions, for many heads at once.

A set is a row of ascending int32 positions, padded at its end with -1; leading dimensions must agree.
"""

import torch

BEHIND_ALL = torch.iinfo(torch.int32).max


def size(index: torch.Tensor) -> torch.Tensor:
    """Count the positions of each set: [...] of [..., K]."""
    return (index >= 0).sum(-1)


def intersection_size(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Count the positions that two sets have in common: [...] of [..., K] and [..., M]."""
    if not second.shape[-1]:
        return torch.zeros_like(size(first))
    second = second.masked_fill(second < 0, BEHIND_ALL).contiguous()
    place = torch.searchsorted(second, first.contiguous())
    met = second.gather(-1, place.clamp_max(second.shape[-1] - 1)) == first
    return met.sum(-1)  # padding of `first` meets nothing: `second` holds no -1 any more


def overlap_coefficient(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Divide what two sets share by the smaller one (SyncKV, Eq. 1); NaN where one is empty."""
    return intersection_size(first, second) / torch.minimum(size(first), size(second))


def jaccard(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Divide what two sets share by their union; NaN where both are empty."""
    shared = intersection_size(first, second)
    return shared / (size(first) + size(second) - shared)
