"""Which steps of a recorded run another trigger would have made slow."""

import numpy as np

from sfi_core.errors import ConfigError
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.replay.setting import Setting
from sfi_traces.replay.support import Floats, Supports


def schedule(supports: Supports, setting: Setting) -> list[str]:
    """Say why each step would be slow; empty for a fast one.

    A step is asked with the run's own rules (`Trigger.reason`), the recorded tokens and queries held fixed.

    Raises:
        ConfigError: The trigger looks at what a trace does not have.
    """
    if setting.policy == "entropy":
        raise ConfigError(
            "trigger-policy entropy cannot be replayed: a trace does not record the entropy of the next token"
        )
    trigger = Trigger(setting.trigger_token_ids, setting.config)
    state = RequestState(prompt_tokens=supports.prompt_tokens)
    state.begin(slow=True, reason="first", new_tokens=supports.prompt_tokens)
    reasons = ["first"]
    cosine_N = mean_cosine(supports).tolist()
    for token, cosine in zip(supports.tokens[:-1], cosine_N[:-1], strict=True):
        state.cosine = cosine
        state.finish_step(token)
        reason = trigger.reason(state)
        state.begin(slow=bool(reason), reason=reason, new_tokens=1)
        reasons.append(reason)
    return reasons


def mean_cosine(supports: Supports) -> Floats:
    """Return each step's query cosine, the mean over layers and heads, [N]; NaN where there is none."""
    known_NU = ~np.isnan(supports.cosine_NU)
    total_N = np.where(known_NU, supports.cosine_NU, 0).sum(1)
    count_N = known_NU.sum(1)
    mean_N: Floats = np.where(count_N > 0, total_N / np.maximum(1, count_N), np.nan)
    return mean_N
