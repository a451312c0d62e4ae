"""The trigger: decides which steps are slow, by Eq. 5 and T_max or by one of the other rules."""

import random
from dataclasses import dataclass

from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState


@dataclass(frozen=True, slots=True)
class Trigger:
    """The trigger set T_trig, as token ids, under the `trigger_policy` of the settings."""

    token_ids: frozenset[int]
    config: SfiConfig

    def reason(self, state: RequestState) -> str:
        """Return why the step after `state.step` is slow, or "" if it is fast (Eq. 5).

        Step 0 is the prefill's last position and always slow (g_0 = 1): ask for later steps only.
        Paper gap: a trigger within `min_gap` steps of the last slow step is dropped, not put off; with
        `trigger_delay` d the boundary token x_{t-1-d} makes step t slow; tokens of the prompt never trigger.
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
        boundary = state.step - config.trigger_delay  # x_{t-1-d}, for the step t to come
        token = state.tokens[boundary] if 0 <= boundary < len(state.tokens) else None
        if policy == "boundary":
            return token in self.token_ids
        if policy == "random":  # the seed holds the request's own text, and nothing that depends on the batch
            seed = f"{config.trigger_seed} {state.prompt_tokens} {state.step + 1} {token}"
            return random.Random(seed).random() < config.random_rate  # noqa: S311 - no secret
        return False
