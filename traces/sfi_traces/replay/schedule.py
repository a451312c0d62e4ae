"""Which steps of a recorded run another trigger would have made slow."""

import random
from dataclasses import dataclass

import numpy as np

from sfi_core.sparse_state import SparseState
from sfi_core.trigger import Trigger
from sfi_traces.replay.setting import Setting
from sfi_traces.replay.support import Supports


@dataclass(frozen=True, slots=True)
class ExtraTrigger:
    """The triggers that a run does not have: query cosine and chance.

    Attributes:
        reason: Their name.
        steps: The steps that they make slow.
    """

    reason: str
    steps: frozenset[int]

    @classmethod
    def of(cls, supports: Supports, setting: Setting) -> "ExtraTrigger":
        """Find their steps: "cosine" as LouisKV and FreeKV, the mean over layers and heads."""
        if setting.cosine_threshold is not None:
            known = ~np.isnan(supports.cosine_NU)
            total = np.where(known, supports.cosine_NU, 0).sum(1)
            low = total < setting.cosine_threshold * known.sum(1)
            return cls("cosine", frozenset(np.flatnonzero(low).tolist()))
        if setting.random_rate is not None:
            chance = random.Random(f"{setting.seed} {supports.request}")  # noqa: S311 - no secret
            drawn = [chance.random() < setting.random_rate for _ in range(supports.steps)]
            return cls("random", frozenset(np.flatnonzero(drawn).tolist()))
        return cls("", frozenset())


def schedule(supports: Supports, setting: Setting) -> list[str]:
    """Say why each step would be slow; empty for a fast one.

    A step is asked with the run's own rules (`Trigger.reason`), the recorded tokens held fixed.
    """
    trigger = Trigger(setting.trigger_token_ids, setting.config)
    extra = ExtraTrigger.of(supports, setting)
    state = SparseState(prompt_tokens=supports.prompt_tokens)
    state.begin(slow=True, reason="first", new_tokens=supports.prompt_tokens)
    reasons = ["first"]
    for token in supports.tokens[:-1]:
        state.finish_step(token)
        reason = trigger.reason(state)
        if reason != "first" and state.step + 1 in extra.steps:
            reason = extra.reason
        state.begin(slow=bool(reason), reason=reason, new_tokens=1)
        reasons.append(reason)
    return reasons
