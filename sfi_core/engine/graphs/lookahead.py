"""Foresees the next step before the host has read the tokens of the step under way."""

from collections.abc import Sequence
from dataclasses import replace

from sfi_core.engine.batch_pass import Requests, known_requests
from sfi_core.engine.ledger import RequestPass, enter, plan_step
from sfi_core.engine.run import Run
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import SLOW


def foresee(run: Run) -> tuple[Requests, list[RequestState]] | None:
    """Foresee the next step, assuming that no request stops and none joins.

    Return the argument of `StepBuffers.write` and the requests' states; None if the step depends on its
    tokens, is audited, or would not fit the store.
    """
    if tokens_decide(run):
        return None
    states = [replace(state) for state in run.requests]
    passes = plan_step(run.policy, states)
    if _audited(run, passes):
        return None
    for state, request in zip(states, passes, strict=True):
        enter(state, request, run.policy)
    if max(state.length for state in states) > run.store.capacity:
        return None
    return known_requests(passes, states, run.policy), states


def audits_next(run: Run) -> bool:
    """Say whether the next step is audited for any request: such a step is not replayed."""
    return run.audit is not None and _audited(run, plan_step(run.policy, run.requests))


def _audited(run: Run, passes: Sequence[RequestPass]) -> bool:
    audit = run.audit
    return audit is not None and any(
        audit.due(state.step + 1, slow=request.kind == SLOW)
        for state, request in zip(run.requests, passes, strict=True)
        if request.generates
    )


def tokens_decide(run: Run) -> bool:
    """Say whether a step's input tokens decide if it is slow."""
    config = run.policy.config
    return config.trigger_policy == "boundary" and config.trigger_delay == 0
