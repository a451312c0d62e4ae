"""When a slow step is due: Eq. 5, T_max and the alternatives."""

import random
from dataclasses import dataclass

from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState


@dataclass(frozen=True, slots=True)
class Trigger:
    """The trigger set T_trig as token ids, and the rules around it.

    Attributes:
        token_ids: T_trig.
        config: Gives `trigger_policy` and what it looks at.
    """

    token_ids: frozenset[int]
    config: SfiConfig

    def reason(self, state: RequestState) -> str:
        """Say why the step after `state.step` must be slow; empty if it may be fast (Eq. 5).

        Paper gap: a trigger within `min_gap` steps of the last slow step is dropped, not put off; with
        `trigger_delay` d the boundary token x_{t-1-d} makes step t slow; tokens of the prompt never trigger.
        Step 0 is not asked: it is the prefill's last position, slow by nature (g_0 = 1).
        """
        config, policy = self.config, self.config.trigger_policy
        if state.step + 1 < config.slow_start:
            return "first"
        if policy == "always":
            return "always"
        gap = state.steps_since_slow + 1
        if policy == "stride":
            return "stride" if gap >= config.stride else ""
        if gap >= config.min_gap and self._fires(state):
            return "trigger" if policy == "boundary" else policy
        due = policy != "never" and state.steps_since_slow >= config.t_max
        return "t_max" if due else ""

    def _fires(self, state: RequestState) -> bool:
        config, policy = self.config, self.config.trigger_policy
        if policy == "boundary":
            boundary = state.step - config.trigger_delay  # x_{t-1-d}, for the step t to come
            return 0 <= boundary < len(state.tokens) and state.tokens[boundary] in self.token_ids
        if policy == "random":  # by request, not by its place in the batch
            draw = random.Random(f"{config.trigger_seed} {state.prompt_tokens} {state.step + 1}")  # noqa: S311 - no secret
            return draw.random() < config.random_rate
        return False
