"""The step after the one under way, as far as it can be known before that one's tokens are read."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sfi_core.engine.forward import Forward, step_requests
from sfi_core.engine.run import Run
from sfi_core.policies.base import StepContext
from sfi_core.state.request import SparseState
from sfi_kernels.step_descriptor import StepRequest

UNKNOWN = -1  # a token that triggers nothing


def foresee(run: Run) -> Callable[..., list[StepRequest]] | None:
    """Say what the next step's descriptor will say, if no request stops and no other takes its place.

    Returns:
        What `FixedStep.write` takes; None where the tokens decide, or the cache is full.
    """
    if tokens_decide(run):
        return None
    back = run.policy.config.trigger_delay + 1
    states = [replace(state, tokens=[*state.tokens[-back:], UNKNOWN]) for state in run.requests]
    plan = run.policy.plan(StepContext(states))
    for state, slow in zip(states, plan.slow_B, strict=True):
        if not state.finished:
            _begin(run, state, slow=slow)
    if max(state.length for state in states) > run.cache.capacity:
        return None
    count = [0 if state.finished else 1 for state in states]
    start = [state.length - new for state, new in zip(states, count, strict=True)]
    forward = Forward(decode=True, final=False, start=start, count=count)
    return partial(step_requests, forward, states, run.policy)


def tokens_decide(run: Run) -> bool:
    """Say whether a step may be slow or fast by the tokens that it decodes."""
    config = run.policy.config
    # a request that stops may take the reason to be slow of a synchronized batch with it
    boundary = config.trigger_policy == "boundary" and config.trigger_delay == 0
    return boundary or run.engine.synchronized


def _begin(run: Run, state: SparseState, *, slow: bool) -> None:
    state.begin(slow=slow, reason="", new_tokens=1)
    run.move_recent(state)
