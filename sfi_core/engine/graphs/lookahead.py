"""The step after the one under way, as far as it can be known before that one's tokens are read."""

from collections.abc import Sequence
from dataclasses import replace

from sfi_core.engine.forward import RequestPass, Requests, known_requests
from sfi_core.engine.run import Run


def foresee(run: Run) -> Requests | None:
    """Say what the next step's descriptor will say, if no request stops and no other takes its place.

    Returns:
        What `StepBuffers.write` takes; None where the tokens decide, the step is audited, or the store is
        full.
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
    """Say whether a request's next step is audited, which takes a step that is not replayed."""
    return run.audit is not None and _audited(run, run.plan())


def _audited(run: Run, reasons: Sequence[str]) -> bool:
    audit = run.audit
    return audit is not None and any(
        audit.due(state.step + 1, slow=bool(reason))
        for state, reason in zip(run.requests, reasons, strict=True)
        if not state.finished
    )


def tokens_decide(run: Run) -> bool:
    """Say whether a step may be slow or fast by the tokens that it decodes."""
    config = run.policy.config
    return config.trigger_policy == "boundary" and config.trigger_delay == 0
