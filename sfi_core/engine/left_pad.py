"""Left padding: prompts of different lengths as one batch."""

from collections.abc import Sequence

import torch


def left_pad(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the left; return ids and mask, [B, T].

    Padding repeats a row's first token, so that a repetition penalty sees no token that the row lacks.
    """
    width = max(map(len, rows))
    ids = torch.tensor([[row[0]] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
