"""Control: every slow step selects K random positions."""

import random

import torch

from sfi_core.policies.base import LayerContext, Selection, Triggered, best


class RandomK(Triggered):
    """Shows the worth of the trigger and of sink and recent tokens without a selector."""

    fills = True

    def select_after(self, context: LayerContext) -> Selection:
        """Draw by `trigger_seed`, prompt length, generated text, step and layer, not by the rest of the batch."""
        _, H, T = context.key_norm_BHT.shape
        score_BHT = torch.stack([self._draw(context, place, H, T) for place in range(len(context.states))])
        return best(context, score_BHT, self.config.budget)

    def _draw(self, context: LayerContext, place: int, heads: int, longest: int) -> torch.Tensor:
        state = context.states[place]
        # the request is told by its text, since its place in the batch must change no draw
        text = *state.tokens[: state.step], state.prompt_tokens
        seed = f"{self.config.trigger_seed} {text} {state.step} {context.layer}"
        generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))  # noqa: S311 - no secret
        ranks = context.ranks
        # drawn token by token and for the heads of all ranks, so that length and ranks change no draw
        score_TH = torch.rand(longest, heads * ranks.size, generator=generator)
        ours_TH = score_TH[:, heads * ranks.number : heads * (ranks.number + 1)]
        return ours_TH.T.to(context.key_norm_BHT.device)
