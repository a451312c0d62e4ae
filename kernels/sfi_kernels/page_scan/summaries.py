"""What a policy keeps of a layer's keys by page, for every row of a batch."""

from typing import NamedTuple

import torch
from torch.nn.functional import pad


class PageSummaries(NamedTuple):
    """Each channel's least and largest key by page, in the keys' dtype; undefined behind a request's last page."""

    low_BHPD: torch.Tensor
    high_BHPD: torch.Tensor

    @classmethod
    def empty(cls, rows: int, key_PHND: torch.Tensor, capacity: int, page: int) -> "PageSummaries":
        """Allocate for `rows` requests of at most `capacity` tokens, in pages of `page`."""
        _, H, _, D = key_PHND.shape
        low, high = (key_PHND.new_zeros(rows, H, -(-capacity // page), D) for _ in range(2))
        return cls(low, high)

    def of(self, rows: slice) -> "PageSummaries":
        """Return some rows, over the same memory."""
        return PageSummaries(*(part[rows] for part in self))

    def grown(self, capacity: int, page: int) -> "PageSummaries":
        """Return room for `capacity` tokens of a request: this one, if it has that, or a copy."""
        more = -(-capacity // page) - self.low_BHPD.shape[2]
        return PageSummaries(*(pad(part, (0, 0, 0, more)) for part in self)) if more > 0 else self


class LastStep(NamedTuple):
    """What a step leaves for the next: its queries, [B, 2, H, G, D], and what it chose ahead, [B, 2, H, K] int32.

    A step of `length` tokens writes the place `length % 2` and reads the other, so that it can be done twice.
    """

    query_B2HGD: torch.Tensor
    index_B2HK: torch.Tensor

    def of(self, rows: slice) -> "LastStep":
        """Return some rows, over the same memory."""
        return LastStep(*(part[rows] for part in self))


def summarize(key_HTD: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each channel's least and largest key by page, [H, P, D]; the last page may lack tokens."""
    H, T, D = key_HTD.shape
    full = T - T % page
    parts = [key_HTD[:, :full].view(H, -1, page, D), key_HTD[:, None, full:]]
    parts = [part for part in parts if part.shape[1] * part.shape[2]]
    low, high = (torch.cat([getattr(part, end)(2) for part in parts], 1) for end in ("amin", "amax"))
    return low, high
