"""Whether a session's decoding steps are replayed as CUDA graphs, and why not."""

from sfi_core.engine.graphs import recorder
from sfi_core.errors import BackendError, ConfigError, SfiError
from sfi_core.hosts.transformers.session import Session
from sfi_core.observers.observer import needs_spans
from sfi_core.policies.base import EvidencePolicy


def records_steps(session: Session) -> bool:
    """Say whether a session's decoding steps are recorded as graphs.

    Raise `BackendError` or `ConfigError`, as `refusal` has it, if graphs are asked for and impossible.
    """
    wanted = session.engine.graphs
    if wanted is False:
        return False
    against = refusal(session)
    if wanted and against is not None:
        raise against
    return against is None


def refusal(session: Session) -> SfiError | None:
    """Return why a session's decoding steps cannot be recorded as graphs; None where they can."""
    device, policy = session.model.device, session.policy
    if not recorder.can_record(device):
        return BackendError(f"CUDA graphs need a CUDA device, got {device.type}; use --set engine.graphs=false")
    if session.backend != "triton":
        return BackendError(
            f"CUDA graphs need the triton backend, got {session.backend}; use --set engine.graphs=false"
        )
    reasons = {
        f"policy {session.policy_name}, which selects at fast steps": (policy.selects_before and not policy.chooses),
        f"policy {session.policy_name}, which selects with more than the evidence": (
            policy.selects_after and not policy.chooses and not isinstance(policy, EvidencePolicy)
        ),
        "tensor parallelism, whose ranks call each other": session.ranks.size > 1,
        "an audit of every step": session.audit is not None and session.audit.every == 1,
        "layers of sliding windows, whose cache moves": any(shape.window for shape in session.shapes()),
        "layers with a state, which recording a step would advance": any(s.state_bytes for s in session.shapes()),
        "kv_device_budget, whose pages come and go": session.engine.kv_device_budget is not None,
        "spans inside the step, as trace.spans=true records": needs_spans(session.observer),
    }
    for reason, holds in reasons.items():
        if holds:
            return ConfigError(f"CUDA graphs must be off with {reason}; use --set engine.graphs=false")
    return None
