"""When a slow step is due: Eq. 5, T_max and the alternatives."""

from dataclasses import dataclass

from sfi_core.config import SfiConfig
from sfi_core.sparse_state import SparseState


@dataclass(frozen=True, slots=True)
class Trigger:
    """The trigger set T_trig as token ids, and the rules around it.

    Attributes:
        token_ids: T_trig.
        config: Gives `trigger_policy`, `t_max`, `min_gap`, `trigger_delay`, `slow_start` and `stride`.
    """

    token_ids: frozenset[int]
    config: SfiConfig

    def reason(self, state: SparseState) -> str:
        """Say why the step after `state.step` must be slow; empty if it may be fast (Eq. 5).

        Paper gap: a trigger within `min_gap` steps of the last slow step is dropped, not put off; with
        `trigger_delay` d the boundary token x_{t-1-d} makes step t slow; tokens of the prompt never trigger.
        Step 0 is not asked: it is the prefill's last position, slow by nature (g_0 = 1).
        """
        if state.step + 1 < self.config.slow_start:
            return "first"
        policy = self.config.trigger_policy
        if policy == "always":
            return "always"
        if policy == "stride":
            return "stride" if state.steps_since_slow + 1 >= self.config.stride else ""
        if policy == "boundary" and self._boundary(state):
            return "trigger"
        due = policy != "never" and state.steps_since_slow >= self.config.t_max
        return "t_max" if due else ""

    def _boundary(self, state: SparseState) -> bool:
        back = self.config.trigger_delay + 1
        return (
            len(state.tokens) >= back
            and state.tokens[-back] in self.token_ids
            and state.steps_since_slow + 1 >= self.config.min_gap
        )
