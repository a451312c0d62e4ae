"""Control: every slow step selects K random positions."""

import random

import torch

from sfi_core.policies.base import LayerContext, Selection, Triggered, best


class RandomK(Triggered):
    """Shows the worth of the trigger and of sink and recent tokens without a selector."""

    fills = True

    def select_after(self, context: LayerContext) -> Selection:
        """Draw by `trigger_seed`, prompt length, generated text, step and layer, not by the rest of the batch."""
        (_, H, T), ranks, scores = context.key_norm_BHT.shape, context.ranks, []
        for state in context.states:
            # the text names the request, since its place in the batch must change no draw
            text = *state.tokens[: state.step], state.prompt_tokens
            seed = f"{self.config.trigger_seed} {text} {state.step} {context.layer}"
            generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))  # noqa: S311 - no secret
            # drawn token by token and for the heads of all ranks, so that length and ranks change no draw
            score_TH = torch.rand(T, H * ranks.size, generator=generator)
            scores.append(score_TH[:, H * ranks.number : H * (ranks.number + 1)].T)
        return best(context, torch.stack(scores).to(context.key_norm_BHT.device), self.config.budget)
