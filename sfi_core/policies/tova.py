"""TOVA: what the last query attended, all heads alike (Oren et al., 2024, arXiv:2401.06104).

Differs from the paper in that sink and recent tokens are always kept; TOVA protects neither.
"""

import torch

from sfi_core.policies.base import Selection
from sfi_core.policies.context import LayerContext
from sfi_core.policies.shared import Evicting
from sfi_core.settings.config import SfiConfig


class Tova(Evicting):
    """At every step the position with the least attention of the step before, over all heads, is gone."""

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Select with the prompt's last query, and slide the recent window."""
        return super().adapt(config).replace(window_prefill=1)

    def select_after(self, context: LayerContext) -> Selection:
        """Keep what the prompt's last query attended most."""
        mean_BT = context.ranks.mean(context.logits().softmax(-1).mean(dim=(1, 2, 3)))
        for note, mean_T in zip(context.notes, mean_BT, strict=True):
            note["score"] = mean_T.expand(context.key_norm_BHT.shape[1], -1)
        return super().select_after(context)

    def observe_fast(self, context: LayerContext) -> None:
        """Note the step's attention over what it read; every head read the same positions."""
        for place, (note, state) in enumerate(zip(context.notes, context.states, strict=True)):
            logits_HGS, position_HS = context.attended(place)
            score_T: torch.Tensor = logits_HGS.new_zeros(state.length)
            mean_S = logits_HGS.softmax(-1).mean(dim=(0, 1))
            score_T[position_HS[0]] = context.ranks.mean(mean_S)
            note["score"] = score_T.expand(len(logits_HGS), -1)
