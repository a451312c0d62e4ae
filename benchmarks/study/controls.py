"""Controls that take `sfi` apart: who chooses the selected memory, and when."""

from sfi_core.policies.base import Policy
from sfi_core.policies.built_in.oracle_top_k import OracleTopK
from sfi_core.policies.built_in.sfi import SFI


class BestAtSlowSteps(SFI):
    """`sfi` whose slow steps select the positions with the most attention in that step, in place of the Selector's."""

    select_after = OracleTopK.select_before


class SelectorAtEveryStep(SFI):
    """The Selector of `sfi` at every step, from the step's own query; it reads every key for that."""

    select_after = Policy.select_after
    select_before = SFI.select_after
    selection_tokens = OracleTopK.selection_tokens


CONTROLS: dict[str, type[Policy]] = {
    "best-at-slow-steps": BestAtSlowSteps,
    "selector-at-every-step": SelectorAtEveryStep,
}
