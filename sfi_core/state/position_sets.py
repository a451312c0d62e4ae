"""The candidate set of a selection."""

import torch


def allowed_positions(
    longest: int, sink_B: torch.Tensor, recent_start_B: torch.Tensor
) -> torch.Tensor:
    """Return the candidate sets J: all but the sink and recent tokens (Eq. 2).

    Args:
        longest: Tokens of the longest request, T.
        sink_B: Number of sink tokens.
        recent_start_B: First position of the recent segment.

    Returns:
        `[B, T]` bool.
    """
    position = torch.arange(longest, device=sink_B.device)
    return (position >= sink_B[:, None]) & (position < recent_start_B[:, None])
