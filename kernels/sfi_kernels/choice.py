"""What a policy chooses for the fast requests of a step, and where it says so."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from sfi_kernels.partial_attention import PseudoToken


class Choice(NamedTuple):
    """What fast requests read; undefined for others.

    `index_BHK` are positions, int32, ascending, padded with -1; `pseudo` stands for the unread keys, None for nothing.
    `diagnostics`, for traces, are [B, H]. A policy that chooses a step ahead reads `index_BHK` in the KV heads
    `corrected_BH`, bool, only, and what the last step chose in the others; the next step reads `ahead_BHK`.
    """

    index_BHK: torch.Tensor
    pseudo: PseudoToken | None = None
    diagnostics: Mapping[str, torch.Tensor] = MappingProxyType({})
    corrected_BH: torch.Tensor | None = None
    ahead_BHK: torch.Tensor | None = None


def write_row(position_BHS: torch.Tensor, length_BH: torch.Tensor, row: int, sink: int, index_HK: torch.Tensor) -> None:
    """Write what a request reads: its `sink` first positions, the chosen ones, then -1; and how many there are."""
    K = index_HK.shape[1]
    position_BHS[row, :, :sink] = torch.arange(sink, dtype=torch.int32)
    position_BHS[row, :, sink : sink + K] = index_HK
    position_BHS[row, :, sink + K :] = -1
    length_BH[row] = sink + K
