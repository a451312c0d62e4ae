"""Which decoding steps of a run are replayed as CUDA graphs, and why others are not: decided here for every loop."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sfi_core.engine.graphs import recorder
from sfi_core.engine.graphs.lookahead import audits_next
from sfi_core.engine.graphs.steps import ForwardPass, StepGraphs
from sfi_core.engine.run import Run
from sfi_core.errors import BackendError, ConfigError, SfiError
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.hosts.transformers.session import Session
from sfi_core.observers.observer import EVERY_SPAN
from sfi_core.policies.base import EvidencePolicy


class Replays:
    """The replayed steps of the run over a cache; they are recorded from the run's first decoding step on.

    `forward` runs the model over the cache. A `patient` one records the graph of a slow step at the second such step,
    not the first.
    """

    def __init__(self, session: Session, cache: SfiCache, forward: ForwardPass, *, patient: bool) -> None:
        """Decide whether steps are recorded; raises what `records_steps` raises."""
        self._session, self._cache, self._forward, self._patient = session, cache, forward, patient
        self._captures = records_steps(session)
        wanted = recorder.can_record(session.model.device) and session.engine.graphs is not False
        self._missed = str(refusal(session) or "") if wanted else ""
        self._graphs: StepGraphs | None = None

    @contextmanager
    def next_step(self, run: Run) -> Iterator[bool]:
        """Say whether the step that the body begins and runs is replayed."""
        if not self._captures:
            if self._missed:
                run.meter.not_replayed = self._missed
                run.meter.count("graph.eager")
            yield False
            return
        if self._graphs is None:
            made = recorder.make_recorder(run.device)
            required = bool(self._session.engine.graphs)
            self._graphs = StepGraphs(run, self._forward, made, required=required, patient=self._patient)
        if not audits_next(run):
            yield True
            return
        run.meter.count("graph.eager")
        with self._graphs.eager_step():
            yield False

    def replay(self, run: Run, brought: Sequence[Sequence[int]]) -> torch.Tensor:
        """Replay a step that the run has begun; arguments and result are those of `StepGraphs.step`."""
        assert self._graphs is not None, "the step is replayed"
        logits_XV = self._graphs.step(brought)
        self._cache.see(self._cache.seen + 1)
        if self._graphs.given_up:
            self._missed = run.meter.not_replayed = self._graphs.given_up
            self._graphs, self._captures = None, False
        return logits_XV

    def ahead(self, token_B: torch.Tensor) -> None:
        """Launch the step of these tokens before the host has read them, where possible."""
        capacity = self._cache.capacity
        if self._graphs is not None and (capacity is None or self._cache.seen + 1 < capacity):
            self._graphs.ahead(token_B)


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
        "spans inside the step, as trace.spans=true records": EVERY_SPAN in session.observer.wants,
    }
    for reason, holds in reasons.items():
        if holds:
            return ConfigError(f"CUDA graphs must be off with {reason}; use --set engine.graphs=false")
    return None
