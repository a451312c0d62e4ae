"""Quest: pages by an upper bound of the current query's logits (Tang et al., 2024, arXiv:2406.10774).

Differs from the authors' code in that the query heads of a KV head share a choice, by their largest bound,
and that layers 0 and 1 are not left dense unless `dense_layers` says so, so that methods compare at equal
tokens read. A page may be cut short where the budget ends.
"""

import torch

from sfi_core.policies.base import Policy, Selection, StepPlan
from sfi_core.policies.context import LayerContext, Notes, StepContext
from sfi_core.policies.shared import always_fast, best, padded
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState


class Quest(Policy):
    """Every step selects anew from the element-wise extremes of each page's keys; nothing is forgotten."""

    selects_before = True

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Slide the recent window: nothing needs an anchor when every step selects."""
        return config.replace(recent_mode="sliding")

    def plan(self, context: StepContext) -> StepPlan:
        """Attend sparsely after the prompt."""
        return always_fast(context)

    def select_before(self, context: LayerContext) -> Selection:
        """Take the tokens of the pages with the highest bounds."""
        page, T = self.config.baseline.page, context.allowed_BT.shape[1]
        scores = []
        for place in range(len(context.states)):
            low_HPD, high_HPD = self._extremes(context, place)
            query_HGD = context.query_BHGWD[place, :, :, -1].float()
            positive, negative = query_HGD.clamp_min(0), query_HGD.clamp_max(0)
            bound_HGP = positive @ high_HPD.mT + negative @ low_HPD.mT
            scores.append(padded(bound_HGP.amax(1).repeat_interleave(page, 1), T))
        return best(context, torch.stack(scores), self.config.budget)

    def selection_tokens(self, state: RequestState) -> float:
        """Two vectors a page, as large as a token's key and value."""
        return state.length / self.config.baseline.page

    def _extremes(self, context: LayerContext, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        # lowest and highest of each channel, [H, P, D]; full pages are looked at once
        note, page, length = (
            context.notes[place],
            self.config.baseline.page,
            context.states[place].length,
        )
        known = note["low"].shape[1] * page if "low" in note else 0
        full = length - length % page
        if full > known:
            key_HTD = context.keys(place, known, full)[0].float()
            key_HPND = key_HTD.reshape(len(key_HTD), -1, page, key_HTD.shape[2])
            _extend(note, key_HPND.amin(2), key_HPND.amax(2))
        if full == length:
            return note["low"], note["high"]
        rest_HND = context.keys(place, full, length)[0].float()
        low_H1D, high_H1D = rest_HND.amin(1, keepdim=True), rest_HND.amax(1, keepdim=True)
        if not full:
            return low_H1D, high_H1D
        return torch.cat([note["low"], low_H1D], 1), torch.cat([note["high"], high_H1D], 1)


def _extend(note: Notes, low_HPD: torch.Tensor, high_HPD: torch.Tensor) -> None:
    for name, new_HPD in (("low", low_HPD), ("high", high_HPD)):
        note[name] = torch.cat([note[name], new_HPD], 1) if name in note else new_HPD
