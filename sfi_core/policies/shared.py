"""What several policies share."""

from collections.abc import Sequence

import torch

from sfi_core.policies.base import Policy, Selection, StepPlan
from sfi_core.policies.context import Evidence, LayerContext, StepContext
from sfi_core.settings.config import SfiConfig
from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.selector import attention_probability
from sfi_kernels.top_k import top_k


def always_fast(context: StepContext) -> StepPlan:
    """Attend sparsely at every step after the prompt."""
    return StepPlan.by_reason([""] * len(context.requests))


def window_probability(context: Evidence) -> torch.Tensor:
    """Return the probabilities within J, the mean over the window and a KV head's queries, [B, H, T]."""
    return attention_probability(context.logits(), context.allowed_BT).mean(dim=(2, 3))


def best(context: Evidence, score_BHT: torch.Tensor, budget: int) -> Selection:
    """Select the `budget` highest scores within J."""
    score_BHT = score_BHT.masked_fill(~context.allowed_BT[:, None], MASKED_SCORE)
    return Selection(top_k.on(context.backend)(score_BHT, budget))


class Triggered(Policy):
    """Base of the policies whose slow steps are the trigger's: any trigger with any selector."""

    selects_after = True
    drafts = True
    offloads = True

    @property
    def most_fast_steps(self) -> int | None:
        """See `Policy`."""
        longest = {"stride": self.config.stride, "never": None, "always": 0}
        return longest.get(self.config.trigger_policy, self.config.t_max)

    def plan(self, context: StepContext) -> StepPlan:
        """Apply the trigger to every request."""
        return StepPlan.by_reason([self.trigger.reason(state) for state in context.requests])


class Evicting(Policy):
    """Base of the policies that forget for good: what a full memory loses is never a candidate again.

    The notes keep a score of every position. Before a step attends, the positions that have left the recent
    window join the memory, and those with the lowest scores leave it.
    """

    selects_before = True
    selects_after = True
    observes_fast = True
    evicts = True

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Slide the recent window: every step evicts."""
        return config.replace(recent_mode="sliding")

    def plan(self, context: StepContext) -> StepPlan:
        """Attend sparsely after the prompt."""
        return always_fast(context)

    def select_after(self, context: LayerContext) -> Selection:
        """Keep the prompt's best positions; it is the only slow step."""
        scores = [note["score"] for note in context.notes]
        T = context.allowed_BT.shape[1]
        selection = best(context, torch.stack([padded(s, T) for s in scores]), self.config.budget)
        for place, (note, state) in enumerate(zip(context.notes, context.states, strict=True)):
            room = state.recent_start - state.sink(self.config.sink)
            note["kept"] = selection.index_BHK[place, :, :room].long()
            note["start"] = state.recent_start
        return selection

    def select_before(self, context: LayerContext) -> Selection:
        """Let the positions that left the recent window compete with the memory."""
        kept = []
        for note, state in zip(context.notes, context.states, strict=True):
            if "kept" not in note:  # the prompt had nothing to select from
                empty_HT = context.key_norm_BHT[0, :, :0]
                note["kept"], note["start"] = empty_HT.long(), state.sink(self.config.sink)
                note.setdefault("score", empty_HT)
            old_HK = note["kept"]
            new_N = torch.arange(note["start"], state.recent_start, device=old_HK.device)
            all_HK = torch.cat([old_HK, new_N.expand(len(old_HK), -1)], 1)
            note["kept"] = self._evict(all_HK, note["score"])
            note["start"] = state.recent_start
            kept.append(note["kept"])
        return Selection(stacked(kept))

    def _evict(self, index_HK: torch.Tensor, score_HT: torch.Tensor) -> torch.Tensor:
        over = index_HK.shape[1] - self.config.budget
        if over <= 0:
            return index_HK
        # of equal scores the older position goes
        order_HK = score_HT.gather(1, index_HK).argsort(dim=1, stable=True)
        return index_HK.gather(1, order_HK[:, over:].sort(1).values)


def stacked(index: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the positions of several requests, [H, K] each, padded with -1 to one width, [B, H, K] int32."""
    widest = max(index_HK.shape[1] for index_HK in index)
    return torch.stack([padded(index_HK, widest, -1) for index_HK in index]).int()


def padded(value_HT: torch.Tensor, width: int, filler: float = 0) -> torch.Tensor:
    """Return the first `width` columns, filled up where there are fewer."""
    missing = max(0, width - value_HT.shape[1])
    return torch.nn.functional.pad(value_HT[:, :width], (0, missing), value=filler)
