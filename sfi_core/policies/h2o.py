"""H2O: the heavy hitters, by attention summed over all queries so far (Zhang et al., 2023, arXiv:2306.14048).

Differs from the authors' code in that the query heads of a KV head add up their attention, each request has
its own sums, and sink tokens are always kept.
"""

import torch

from sfi_core.policies.context import LayerContext, Notes
from sfi_core.policies.shared import Evicting, padded

ROOM = 256  # positions by which the sums grow


class H2O(Evicting):
    """Keep `budget` positions with the largest sums, beside sink and recent tokens; the rest is gone."""

    observes_prompt = True

    def observe_prompt(self, context: LayerContext) -> None:
        """Add the attention of some of the prompt's queries."""
        sum_BHT = context.logits().softmax(-1).nan_to_num(0.0).sum(dim=(2, 3))
        for note, sum_HT in zip(context.notes, sum_BHT, strict=True):
            _sums(note, sum_HT)[:, : sum_HT.shape[1]] += sum_HT

    def observe_fast(self, context: LayerContext) -> None:
        """Add the step's attention over what it read."""
        for place, (note, state) in enumerate(zip(context.notes, context.states, strict=True)):
            logits_HGS, position_HS = context.attended(place)
            padding_HT = logits_HGS.new_empty(len(logits_HGS), state.length)
            sum_HS = logits_HGS.softmax(-1).sum(1)
            _sums(note, padding_HT).scatter_add_(1, position_HS, sum_HS)


def _sums(note: Notes, like_HT: torch.Tensor) -> torch.Tensor:
    # the sums so far, with room for as many positions
    old_HT = note.get("score")
    H, T = like_HT.shape
    if old_HT is None:
        note["score"] = like_HT.new_zeros(H, T + ROOM)
    elif old_HT.shape[1] < T:
        note["score"] = padded(old_HT, T + ROOM)
    sums_HT: torch.Tensor = note["score"]
    return sums_HT
