"""Layout of a key's code: 16 channels in each 32-bit word, more bits for the channels that matter most.

A channel is a projection of the key. Its level n, 0 to 2^bits - 1, stands for (n + 0.5 - 2^(bits - 1)) steps.
A key has W words with the same slots; slot s begins at bit `SHIFTS[s]`. The C = 16 W channels are in the
order of their ranks: slot s of word w holds channel s * W + w.
"""

from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

BITS = (4, 4, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1)  # of a word's slots
SLOTS = len(BITS)
WIDTHS = (64, 128)  # a head wider than each has twice as many words
SHIFTS = tuple(accumulate(BITS, initial=0))[:-1]


class CodeBasis(NamedTuple):
    """The projections of a layer's keys and queries to channels, by KV head; float32.

    `mean_HD` is subtracted from keys before they are coded. `encode_HDC` gives the keys' channels in steps of
    the channel, `query_HDC` those of queries times the channel's step.
    """

    mean_HD: torch.Tensor
    encode_HDC: torch.Tensor
    query_HDC: torch.Tensor

    @property
    def encode_HWDC(self) -> torch.Tensor:
        """The keys' projections by word."""
        return self.encode_HDC.reshape(*self.encode_HDC.shape[:2], SLOTS, -1).permute(0, 3, 1, 2)

    @property
    def query_HWCD(self) -> torch.Tensor:
        """The queries' projections by word and slot."""
        return self.query_HDC.reshape(*self.query_HDC.shape[:2], SLOTS, -1).permute(0, 3, 2, 1)


def words(D: int) -> int:
    """Return W, the words of a key D numbers wide: 1 up to 64, 2 up to 128, 4 beyond."""
    return 1 << sum(width < D for width in WIDTHS)


def bits_of(D: int) -> tuple[int, ...]:
    """Return the bits of each channel of a key D numbers wide, C of them."""
    return tuple(bits for bits in BITS for _ in range(words(D)))


@cache
def half_levels(D: int, device: torch.device) -> torch.Tensor:
    """Return 2^(bits - 1) of each channel, [C] float32, cached."""
    return torch.tensor([2.0 ** (bits - 1) for bits in bits_of(D)], device=device)


@cache
def level_range(D: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and the highest level of each channel, [C] float32 each, cached."""
    highest_C = 2 * half_levels(D, device) - 1
    return torch.zeros_like(highest_C), highest_C
