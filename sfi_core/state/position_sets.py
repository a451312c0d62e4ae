"""The candidate set of the managed sparse state: what may be selected."""

import torch


def allowed_positions(
    longest: int, sink_B: torch.Tensor, recent_start_B: torch.Tensor
) -> torch.Tensor:
    """Return the candidate sets J: all but the sink and recent tokens (Eq. 2).

    Args:
        longest: Tokens of the longest request, T.
        sink_B: Sink tokens.
        recent_start_B: First position of the recent segment.

    Returns:
        `[B, T]` bool; all False where sink and recent cover everything.
    """
    position = torch.arange(longest, device=sink_B.device)
    return (position >= sink_B[:, None]) & (position < recent_start_B[:, None])
