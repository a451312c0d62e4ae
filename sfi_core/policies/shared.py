"""Shared by several policies."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from sfi_core.policies.base import Policy, Selection
from sfi_core.policies.context import Evidence
from sfi_core.state.request import RequestState
from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.top_k import top_k


def best(context: Evidence, score_BHT: torch.Tensor, budget: int) -> Selection:
    """Select the `budget` highest scores within J."""
    score_BHT = score_BHT.masked_fill(~context.allowed_BT[:, None], MASKED_SCORE)
    return Selection(top_k.on(context.backend)(score_BHT, budget))


class Triggered(Policy):
    """Base of the policies whose slow steps the trigger decides."""

    drafts = True
    offloads = True

    @property
    def most_fast_steps(self) -> int | None:
        """See `Policy`."""
        longest = {"stride": self.config.stride, "never": None, "always": 0}
        return longest.get(self.config.trigger_policy, self.config.t_max)

    def plan(self, requests: Sequence[RequestState]) -> list[str]:
        """Ask the trigger about every request."""
        return [self.trigger.reason(state) for state in requests]


def stacked(index: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack the positions of requests, [H, K] each, padded with -1 to one width: [B, H, K] int32."""
    widest = max(index_HK.shape[1] for index_HK in index)
    padded = [pad(index_HK, (0, widest - index_HK.shape[1]), value=-1) for index_HK in index]
    return torch.stack(padded).int()
