"""What a fast step reads, as a mask: the reference of tests."""

import torch


def attended_positions(index_BHS: torch.Tensor, recent_start_B: torch.Tensor, length_B: torch.Tensor) -> torch.Tensor:
    """Return what a fast step reads: sink, selected and recent tokens (Eqs. 1, 25).

    Args:
        index_BHS: Positions of the packed segment, sinks included, padded with -1.
        recent_start_B: First position of the recent segment.
        length_B: Cached tokens, the query's own included.

    Returns:
        `[B, H, T]` bool with T the longest length.
    """
    B, H, _ = index_BHS.shape
    position = torch.arange(int(length_B.max()), device=index_BHS.device)
    recent_BT = (position >= recent_start_B[:, None]) & (position < length_B[:, None])
    read = recent_BT[:, None].repeat(1, H, 1)
    packed = torch.zeros(B, H, len(position) + 1, dtype=torch.bool, device=index_BHS.device)
    packed.scatter_(2, index_BHS.long() % (len(position) + 1), value=True)  # -1 lands past the end
    return read | packed[:, :, :-1]
