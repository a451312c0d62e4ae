"""Foresees the next step before the host has read the tokens of the step under way."""

from collections.abc import Sequence
from dataclasses import replace

from sfi_core.engine.batch_pass import RequestPass, Requests, known_requests
from sfi_core.engine.run import Run


def foresee(run: Run) -> Requests | None:
    """Foresee the next step, assuming that no request stops and none joins.

    Returns:
        The argument of `StepBuffers.write`; None if the step depends on its tokens, is audited, or would not
        fit the store.
    """
    if tokens_decide(run):
        return None
    states = [replace(state) for state in run.requests]
    reasons = run.policy.plan(states)
    if _audited(run, reasons):
        return None
    passes = []
    for state, reason in zip(states, reasons, strict=True):
        if state.finished:
            passes.append(RequestPass())
            continue
        slow = bool(reason)
        passes.append(RequestPass.decode(slow=slow, reason=""))
        state.begin(slow=slow, reason="", new_tokens=1)
        run.move_recent(state)
    if max(state.length for state in states) > run.store.capacity:
        return None
    return known_requests(passes, states, run.policy)


def audits_next(run: Run) -> bool:
    """Say whether the next step is audited for any request: such a step is not replayed."""
    return run.audit is not None and _audited(run, run.plan())


def _audited(run: Run, reasons: Sequence[str]) -> bool:
    audit = run.audit
    return audit is not None and any(
        audit.due(state.step + 1, slow=bool(reason))
        for state, reason in zip(run.requests, reasons, strict=True)
        if not state.finished
    )


def tokens_decide(run: Run) -> bool:
    """Say whether a step's input tokens decide if it is slow."""
    config = run.policy.config
    return config.trigger_policy == "boundary" and config.trigger_delay == 0
