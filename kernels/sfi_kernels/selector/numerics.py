"""Arithmetic that the Selector's formulas share."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def check_not_negative(value: int, name: str) -> None:
    """Raise `ValueError` if a count is below 0."""
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32; float32 and float64 stay as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def masked(tensor: torch.Tensor, allowed: torch.Tensor | None, value: float) -> torch.Tensor:
    """Put `value` where the broadcast `allowed` is False; None allows everything."""
    return tensor if allowed is None else tensor.masked_fill(~allowed, value)


def distribution(weight_BHT: torch.Tensor) -> torch.Tensor:
    """Scale nonnegative weights to sum to 1 over T; a row of zeros stays 0.

    Dividing by the peak first keeps rows of very small or large weights exact; an epsilon in the denominator would not.
    """
    peak_BH1 = weight_BHT.amax(-1, keepdim=True)
    relative_BHT = weight_BHT / peak_BH1.masked_fill(peak_BH1 == 0, 1.0)
    return relative_BHT / relative_BHT.sum(-1, keepdim=True).clamp_min(1.0)


def neighborhood_peak(tensor: torch.Tensor, radius: int) -> torch.Tensor:
    """Take the maximum over `radius` positions on each side, along the last dimension."""
    padded = torch.nn.functional.pad(tensor, (radius, radius), value=-torch.inf)
    if by_numpy(tensor):
        return torch.from_numpy(window_peak(padded.detach().numpy(), 2 * radius + 1, np.maximum))
    peak: torch.Tensor = window_peak(padded, 2 * radius + 1, torch.maximum)
    return peak


def by_numpy(tensor: torch.Tensor) -> bool:
    """Say whether numpy takes maxima: three times as fast as PyTorch for rows of some thousand numbers."""
    return tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16


def window_peak(values: Any, window: int, maximum: Callable[[Any, Any], Any]) -> Any:
    """Take the maximum of every `window` neighbors along the last dimension of an array or tensor."""
    # windows that double, each the maximum of two: pooling takes as many comparisons as a window is wide
    reached = 1
    while reached < window:
        step = min(reached, window - reached)
        values = maximum(values[..., :-step], values[..., step:])
        reached += step
    return values
