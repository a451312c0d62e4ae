"""Control: every step reads the K positions that get the most attention in this step."""

from typing import ClassVar

from sfi_core.policies.base import BatchContext, Companion, Evidence, Policy, Selection, best
from sfi_core.state.request import RequestState
from sfi_kernels.choice import Choice
from sfi_kernels.selector import attention_probability


class OracleTopK(Companion, Policy):
    """An upper bound for K tokens per KV head; it reads every key, so it saves no time."""

    fills = drafts = True
    fixed: ClassVar = {"recent_mode": "sliding"}  # since every step selects

    def choose(self, batch: BatchContext) -> Choice | None:
        """Choose by the current queries."""
        return batch.read(self.most_attended(batch.evidence())) if batch.fast else None

    def most_attended(self, context: Evidence) -> Selection:
        """Rank J by the mean probability over the query heads of a KV head."""
        probability = attention_probability(context.logits(), context.allowed_BT)
        return best(context, probability.mean(dim=(2, 3)), self.config.budget)

    def selection_tokens(self, state: RequestState) -> float:
        """Count every key as half a token."""
        return state.length / 2
