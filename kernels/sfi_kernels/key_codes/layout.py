"""Layout of a key's code: 16 channels in a 32-bit word, more bits for the channels that matter most.

A channel is a projection of the key. Its level n, 0 to 2^bits - 1, stands for (n + 0.5 - 2^(bits - 1)) steps.
Channel c begins at bit `SHIFTS[c]` of the word.
"""

from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

BITS = (4, 4, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1)
CHANNELS = len(BITS)
SHIFTS = tuple(accumulate(BITS, initial=0))[:-1]


class CodeBasis(NamedTuple):
    """The projections of a layer's keys and queries to channels, by KV head; float32.

    `mean_HD` is subtracted from keys before they are coded. `encode_HDC` gives the keys' channels in steps of
    the channel, `query_HDC` those of queries times the channel's step.
    """

    mean_HD: torch.Tensor
    encode_HDC: torch.Tensor
    query_HDC: torch.Tensor


@cache
def half_levels(device: torch.device) -> torch.Tensor:
    """Return 2^(bits - 1) of each channel, [C] float32, cached."""
    return torch.tensor([2.0 ** (bits - 1) for bits in BITS], device=device)


@cache
def level_range(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and the highest level of each channel, [C] float32 each, cached."""
    highest_C = 2 * half_levels(device) - 1
    return torch.zeros_like(highest_C), highest_C
