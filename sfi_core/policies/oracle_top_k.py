"""Control: at every step, the K positions with the most attention of this very step."""

from sfi_core.config import SfiConfig
from sfi_core.policies.base import LayerContext, Policy, Selection, StepContext, StepPlan
from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.selector import attention_probability
from sfi_kernels.top_k import top_k


class OracleTopK(Policy):
    """An upper bound on what K tokens per KV head can hold; reads every key, so it is never fast."""

    selects_before = True

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Slide the recent window: nothing needs an anchor when every step selects."""
        return config.replace(recent_mode="sliding")

    def plan(self, context: StepContext) -> StepPlan:
        """Attend sparsely after the prompt."""
        return StepPlan.by_reason([""] * len(context.requests))

    def select_before(self, context: LayerContext) -> Selection:
        """Rank J by the mean probability over the query heads of a KV head."""
        probability = attention_probability(context.logits(), context.allowed_BT)
        score = probability.mean(dim=(2, 3)).masked_fill(~context.allowed_BT[:, None], MASKED_SCORE)
        return Selection(top_k.on(context.backend)(score, self.config.budget))
