"""Planning on the device: the next step's descriptor from the tokens just sampled, without the host."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sfi_core.policies.base import Policy
from sfi_core.policies.full_kv import FullKV
from sfi_core.policies.snapkv import SnapKV
from sfi_core.policies.streaming_llm import StreamingLLM
from sfi_core.policies.support import Triggered
from sfi_core.sparse_state import SparseState
from sfi_kernels.advance import StepRules, advance, bitmaps
from sfi_kernels.advance.state import MOST, MOST_DELAY
from sfi_kernels.step_descriptor import StepDescriptor, sent

if TYPE_CHECKING:
    from sfi_core.run import Run


@dataclass(frozen=True, slots=True)
class Schedule:
    """A policy's plan as the device can make it: from tokens and counts alone.

    Attributes:
        slow_start: Steps from step 0 on that are slow.
        t_max: Fast steps after which one is due to be slow.
        due: The reason of such a step.
        token_ids: Those that trigger a slow step.
    """

    slow_start: int
    t_max: int
    due: str
    token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, policy: Policy) -> "Schedule | None":
        """Return a policy's schedule; None where its plan looks at more."""
        plan = type(policy).plan  # a subclass may have another
        if plan is FullKV.plan:
            return cls(1, 0, "full-kv")
        if plan in (StreamingLLM.plan, SnapKV.plan):
            return cls(1, MOST, "")
        config, start = policy.trigger.config, policy.trigger.config.slow_start
        if plan is not Triggered.plan or config.trigger_delay > MOST_DELAY:
            return None
        return {
            "boundary": cls(start, config.t_max, "t_max", policy.trigger.token_ids),
            "t-max": cls(start, config.t_max, "t_max"),
            "stride": cls(start, config.stride - 1, "stride"),
            "always": cls(start, 0, "always"),
            "never": cls(start, MOST, ""),
        }.get(config.trigger_policy)


class DevicePlan:
    """A run's states on its device, and how they advance; it begins at any step of the run.

    The host's own states may follow as late as they like: only `load` looks at them again.

    Attributes:
        reasons: The names of the numbers in a request's word REASON; "" is a fast step's.
        rules: When a step is slow, and what it leaves.
        bitmap_2X: The trigger set and the stop tokens.
        state_BX: The requests' words, of `sfi_kernels.advance.state`, always at one address.
        summary_2: The numbers of slow and of fast requests of the step that `step` described, likewise.
    """

    def __init__(self, run: "Run") -> None:
        """Take over a run whose prompt has been read, under a policy that `supports` takes."""
        policy, schedule = run.policy, Schedule.of(run.policy)
        assert schedule is not None, "the policy's plan looks at tokens alone"
        config = policy.config
        refreshes = any(policy.selects_in(layer) for layer in run.layers)
        self._sink, self._token_ids = config.sink, schedule.token_ids
        self._advance = advance.on(run.cache.backend)
        self.reasons = ("", "first", "trigger", schedule.due, "batch")
        self.rules = StepRules(
            slow_start=min(schedule.slow_start, MOST),
            min_gap=min(policy.trigger.config.min_gap, MOST),
            t_max=min(schedule.t_max, MOST),
            delay=min(policy.trigger.config.trigger_delay, MOST_DELAY),
            budget=min(config.budget, MOST) if refreshes else 0,
            recent=min(config.recent, MOST),
            sliding=config.recent_mode == "sliding",
            synchronized=run.engine.synchronized,
        )
        self.bitmap_2X = bitmaps(schedule.token_ids, run.stop_ids, run.device)
        words = [self._words(state) for state in run.requests]
        self.state_BX = sent(torch.tensor(words, dtype=torch.int32), run.device)
        self.summary_2 = torch.zeros(2, dtype=torch.int32, device=run.device)

    @staticmethod
    def supports(policy: Policy) -> bool:
        """Say whether the device can make a policy's plan; selecting on fast steps is the host's, too."""
        return Schedule.of(policy) is not None and not policy.selects_before

    def load(self, row: int, state: SparseState) -> None:
        """Put another request in a row of the batch, such as one whose prompt has just been read."""
        words = torch.tensor(self._words(state), dtype=torch.int32)
        self.state_BX[row] = sent(words, self.state_BX.device)

    def step(
        self,
        token_B: torch.Tensor,
        descriptor: StepDescriptor,
        dense_descriptor: StepDescriptor | None = None,
    ) -> None:
        """Describe the step after the one that generated the tokens; the arguments are those of `advance`."""
        tensors = token_B, self.bitmap_2X, self.state_BX, self.summary_2
        self._advance(*tensors, descriptor, dense_descriptor, self.rules)

    def _words(self, state: SparseState) -> list[int]:
        """Return a request's words in their order."""
        triggers = 0
        # the token of the step under way comes with the next call of `step`, noted or not
        for token in state.tokens[: state.step][-MOST_DELAY - 1 :]:
            triggers = triggers << 1 | (token in self._token_ids)
        return [
            state.step,
            state.length,
            state.recent_start,
            state.packed_tokens,
            state.sink(self._sink),
            state.steps_since_slow,
            self.reasons.index(state.reason if state.slow else ""),
            triggers,
            int(state.finished),
        ]
