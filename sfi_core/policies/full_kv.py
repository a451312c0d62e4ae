"""The baseline: dense attention at every step."""

from sfi_core.policies.base import Policy, StepPlan
from sfi_core.policies.context import StepContext


class FullKV(Policy):
    """Every step is slow and nothing is ever selected."""

    def plan(self, context: StepContext) -> StepPlan:
        """Always attend densely."""
        return StepPlan.by_reason(["full-kv"] * len(context.requests))
