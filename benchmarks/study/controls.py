"""Controls that take `sfi` apart: who chooses the selected memory, and when."""

from sfi_core.policies.base import BatchContext, Companion, Policy
from sfi_core.policies.built_in.oracle_top_k import OracleTopK
from sfi_core.policies.built_in.sfi import SFI
from sfi_kernels.choice import Choice


class BestAtSlowSteps(SFI):
    """`sfi` whose slow steps select the positions with the most attention in that step, in place of the Selector's."""

    select_after = OracleTopK.most_attended


class SelectorAtEveryStep(Companion, SFI):
    """The Selector of `sfi` at every step, from the step's own query; it reads every key for that."""

    select_after = Policy.select_after

    def choose(self, batch: BatchContext) -> Choice | None:
        """See `Companion`."""
        return batch.read(SFI.select_after(self, batch.evidence())) if batch.fast else None

    selection_tokens = OracleTopK.selection_tokens


CONTROLS: dict[str, type[Policy]] = {
    "best-at-slow-steps": BestAtSlowSteps,
    "selector-at-every-step": SelectorAtEveryStep,
}
