"""What a key's code looks like: 16 channels in one 32-bit word, the channels that matter most with more bits.

A channel is a projection of the key. Its level is a whole number n of 0 to 2^bits - 1 and stands for
(n + 0.5 - 2^(bits - 1)) steps. Channel c lies in the word from bit `SHIFTS[c]` on.
"""

from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

BITS = (4, 4, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1)
CHANNELS = len(BITS)
SHIFTS = tuple(accumulate(BITS, initial=0))[:-1]


class CodeBasis(NamedTuple):
    """What turns a layer's keys and queries into channels, by KV head.

    Attributes:
        mean_HD: Taken from keys before they are coded, float32.
        encode_HDC: Keys to channels, in steps of the channel, float32.
        query_HDC: Queries to channels, times the channel's step, float32.
    """

    mean_HD: torch.Tensor
    encode_HDC: torch.Tensor
    query_HDC: torch.Tensor


@cache
def half_levels(device: torch.device) -> torch.Tensor:
    """Return 2^(bits - 1) of each channel, [C] float32; one tensor for all callers."""
    return torch.tensor([2.0 ** (bits - 1) for bits in BITS], device=device)


@cache
def level_range(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and the highest level of each channel, [C] float32 each, like `half_levels`."""
    highest_C = 2 * half_levels(device) - 1
    return torch.zeros_like(highest_C), highest_C
