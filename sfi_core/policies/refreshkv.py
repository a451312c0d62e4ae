"""RefreshKV: full attention every few steps if the query has moved (Xu et al., 2024, arXiv:2411.05787).

Differs from the paper in that a step is slow as a whole, by the mean over layers and heads of the last step's
query, where the paper decides in each layer by its own; and in that tokens decoded since the last refresh
stay, where there each takes the place of the one with the lowest score. Paper gap: the threshold is not
published; `cosine_threshold` is it, and `stride` the steps between two looks.
"""

import torch

from sfi_core.policies.base import EvidencePolicy, Selection, StepPlan
from sfi_core.policies.context import Evidence, StepContext
from sfi_core.policies.shared import best
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.signals import SLOW_COSINE
from sfi_kernels.selector import attention_probability


class RefreshKV(EvidencePolicy):
    """Slow every `stride` steps, unless the query is still like that of the last slow step."""

    signal = SLOW_COSINE
    offloads = True

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Select with the last query, and keep what was decoded since."""
        return config.replace(window_prefill=1, recent_mode="anchored")

    def plan(self, context: StepContext) -> StepPlan:
        """Look at the query every `stride` steps."""
        return StepPlan.by_reason([self._reason(state) for state in context.requests])

    def select_after(self, context: Evidence) -> Selection:
        """Keep the top K, by the maximum over neighbors and a KV head's queries."""
        highest_BHT = attention_probability(context.logits(), context.allowed_BT).amax(dim=(2, 3))
        pool = self.config.baseline.pool
        score_BHT = torch.nn.functional.max_pool1d(highest_BHT, pool, stride=1, padding=pool // 2)
        return best(context, score_BHT, self.config.budget)

    def _reason(self, state: RequestState) -> str:
        looks = (state.steps_since_slow + 1) % self.config.stride == 0
        return "cosine" if looks and state.cosine <= self.config.cosine_threshold else ""
