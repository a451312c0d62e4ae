"""Which decoding steps of a run are not the model's modules one by one, and why: decided here for every loop.

On a GPU steps are replayed as CUDA graphs, on a CPU each is one compiled call.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from sfi_core.engine.compiled_steps import CompiledSteps, StepModel
from sfi_core.engine.graphs import recorder
from sfi_core.engine.graphs.buffers import audits_next
from sfi_core.engine.graphs.steps import StepGraphs
from sfi_core.engine.run import Run
from sfi_core.errors import BackendError, ConfigError
from sfi_core.hosts.transformers.cache import CACHE_NAME, SfiCache
from sfi_core.hosts.transformers.own_layers import states
from sfi_core.hosts.transformers.session import Session
from sfi_core.hosts.transformers.shapes import mixer_name
from sfi_core.hosts.transformers.step_model import UnknownError, step_model
from sfi_core.hosts.transformers.window_layers import Windows
from sfi_core.machine.private import has_hooks
from sfi_core.machine.threads import SMALL_BYTES, one_thread
from sfi_core.models.describe import ModelWeights
from sfi_core.observers.observer import EVERY_SPAN, SPANS
from sfi_core.policies.base import EvidencePolicy
from sfi_kernels.compiled import KINDS, fastest

MOST_TOKENS = 16  # of a compiled step; a matrix product is quicker for more


class Replays:
    """The steps of the run over a cache of `batch` rows that are replayed, from its first decoding step on.

    `model` runs the others. A `patient` one records the graph of a slow step at the second such step, not the first.
    """

    def __init__(self, session: Session, cache: SfiCache, batch: int, *, patient: bool = True) -> None:
        """Decide whether steps are replayed; raises what `records_steps` raises."""
        self._session, self._cache, self._patient, self._batch = session, cache, patient, batch
        parameters = inspect.signature(session.model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._small = False  # whether a step on the CPU reads too few bytes to gain by threads
        if cache.capacity is not None and session.model.device.type == "cpu":
            rows = batch * cache.capacity * sum(shape.row_bytes for shape in session.shapes())
            self._small = ModelWeights.of(session.model).read(batch) + rows < SMALL_BYTES
        self._steps: StepGraphs | CompiledSteps | None = None
        self._room = 0  # tokens of a request in the pages that the graphs know
        self._tables: StepModel | None = None
        self._missed, self._captures = "", records_steps(session)
        self._compiles = session.model.device.type == "cpu" and session.backend == "torch"
        if self._compiles:
            self._tables, self._missed = compiles_steps(session, batch)
            self._captures = self._tables is not None
        elif recorder.can_record(session.model.device) and session.engine.graphs is not False:
            self._missed = str(refusal(session) or "")
        answers = session.ranks.exchange((self._captures, self._missed))  # every rank, or none
        self._captures = all(captures for captures, _ in answers)
        self._missed = next((missed for _, missed in answers if missed), "")

    def model(
        self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, mask: torch.Tensor | None = None, *, last: bool,
        planned: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Return the logits, [B, T, V], of the `last` token alone, if the model can; `mask` is None without padding.

        If the pass is `planned`, the engine has begun its step.
        """
        self._cache.planned = planned
        try:
            with one_thread(wanted=self._small and (not last or ids_BT.shape[1] == 1)):
                output = self._session.model(
                    input_ids=ids_BT, attention_mask=mask, position_ids=positions_BT, use_cache=True,
                    **{CACHE_NAME: self._cache}, **self._options if last else {},
                )  # fmt: skip
        finally:
            self._cache.planned = False
        logits: torch.Tensor = output.logits
        return logits

    @property
    def on_device(self) -> bool:
        """Whether steps are replayed as graphs, which can take tokens that only the device knows."""
        return isinstance(self._steps, StepGraphs)

    @property
    def threads(self) -> int:
        """How many threads a decoding step is worth."""
        return 1 if self._small else torch.get_num_threads()

    def planned(self, token_BW: torch.Tensor, position_BW: torch.Tensor) -> torch.Tensor:
        """Run a step that the engine has planned, as `ForwardPass`: the cache counts no token."""
        seen = self._cache.seen  # `update` counts the tokens each time that the step is recorded
        self._cache.attach(self._session.run)
        try:
            return self.model(token_BW, position_BW, last=token_BW.shape[1] == 1, planned=True)
        finally:
            self._cache.see(seen)

    @contextmanager
    def next_step(self, run: Run, tokens: int, against: str = "") -> Iterator[bool]:
        """Say whether the step of so many tokens in the body is replayed; not if anything is `against` it."""
        if self._captures and not against and (self._tables is None or tokens <= MOST_TOKENS):
            self._make_room(run)
            self._steps = self._steps or self._begin(run)
            if not audits_next(run):
                yield True
                return
        if self._captures or self._missed:
            run.meter.count("step.eager" if self._compiles else "graph.eager")
            reason = self._missed or against
            if reason and self._compiles:
                run.meter.not_compiled = reason
            elif reason:
                run.meter.not_replayed = reason
        with self.eager_pass():
            yield False

    def _make_room(self, run: Run) -> None:
        # graphs write to pages that must not move
        if self._compiles:
            return
        run.store.grow(max((state.length + 1 for state in run.requests if not state.finished), default=0))
        if isinstance(self._steps, StepGraphs) and run.store.capacity != self._room:
            self._steps.leave()
            self._steps = None

    def _begin(self, run: Run) -> StepGraphs | CompiledSteps:
        if self._tables is not None:
            return CompiledSteps(run, self._tables, self.threads, Windows(self._cache.layers))
        record, required = recorder.make_recorder(run.device), bool(self._session.engine.graphs)
        record, self._room = partial(self._record, record), run.store.capacity
        return StepGraphs(run, self.planned, record, required=required, patient=self._patient)

    def _record(self, record: recorder.Recorder, work: recorder.Work) -> recorder.Work:
        # leave the states of layers as they were, though it takes some steps to record one
        layers = self._cache.layers
        known = [(layer, *state, state[-1].clone()) for layer in layers for state in states(layer)]
        moved: list[int] = []
        try:
            recorded = record(work)
        finally:
            for layer, kind, number, state, before in known:
                if getattr(layer, kind)[number] is not state:
                    moved.append(layers.index(layer))
                    getattr(layer, kind)[number] = state
                state.copy_(before)
        if moved:
            name = mixer_name(self._session.model, moved[0])
            raise BackendError(f"a graph must find states where they were, but {name} assigns new state tensors")
        return recorded

    def replay_given(self, run: Run, ids_B1: torch.Tensor, position_B1: torch.Tensor | None) -> torch.Tensor:
        """Replay a step of another loop, which has begun; return the logits, [B, V], for it to keep.

        `ids_B1` and `position_B1`, which may have one row, are on the device; None for the cache's padded length.
        """
        if not isinstance(self._steps, StepGraphs):
            return self.replay(run, ids_B1.tolist())
        self._steps.give(ids_B1, self._cache.seen if position_B1 is None else position_B1[:, -1:])
        return self.replay(run, ()).clone()

    def replay(self, run: Run, brought: Sequence[Sequence[int]], unread_N: torch.Tensor | None = None) -> torch.Tensor:
        """Replay a step that the run has begun; arguments and result are those of `StepGraphs.step`."""
        assert self._steps is not None, "the step is replayed"
        given = (brought, unread_N) if self.on_device else (brought,)
        logits_XV = self._steps.step(*given)
        self._cache.see(self._cache.seen + 1)
        if self._steps.given_up:
            self._missed = run.meter.not_replayed = self._steps.given_up
            self._steps, self._captures = None, False
        return logits_XV

    def eager_pass(self) -> AbstractContextManager[None]:
        """Run the pass in the body module by module, as a loop of the user's asks for."""
        return nullcontext() if self._steps is None else self._steps.eager_step()

    def ahead(self, token_B: torch.Tensor) -> None:
        """Launch the step of these tokens before the host has read them, where possible.

        Not where another prompt may join before the step: it would be run again, and advance states twice.
        """
        capacity, cache = self._cache.capacity, self._cache
        joins = (cache.requests or 0) > self._batch and any(any(states(layer)) for layer in cache.layers)
        if self._steps is not None and not joins and (capacity is None or cache.seen + 1 < capacity):
            self._steps.ahead(token_B)


def compiles_steps(session: Session, batch: int) -> tuple[StepModel | None, str]:
    """Return the tables of a session's compiled steps on a CPU, or None and why steps are not compiled."""
    by = fastest(session.backend, session.model.device)
    if session.engine.graphs is False or by != "numba" or SPANS in session.observer.wants:
        return None, ""
    windows = any(shape.window for shape in session.shapes())
    reasons = {
        "tensor parallelism, whose ranks add up sums within a layer": session.ranks.size > 1,
        **common_reasons(session),
        "layers with a state": any(shape.state_bytes for shape in session.shapes()),
        "kv_device_budget": session.tiers is not None,
        f"{session.policy_name}.ahead=half, which chooses beside another layer": session.policy.predicts,
        "sliding windows in a lossless run or of several requests": windows and (batch > 1 or session.engine.lossless),
        "sliding windows beside a cache of kv_dtype": windows and session.kv_dtype is not None,
        f"a model of {session.model.dtype}": session.model.dtype not in KINDS,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        return None, reason
    try:
        return step_model(session.model), ""
    except UnknownError as error:
        return None, str(error)


def records_steps(session: Session) -> bool:
    """Say whether a session's decoding steps are recorded as graphs; raise `refusal` if asked for and impossible."""
    against = None if session.engine.graphs is False else refusal(session)
    if session.engine.graphs and against is not None:
        raise against
    return session.engine.graphs is not False and against is None


def refusal(session: Session) -> BackendError | ConfigError | None:
    """Return why a session's decoding steps cannot be recorded as graphs; None where they can."""
    device, policy, way = session.model.device, session.policy, "use --set engine.graphs=false"
    if not recorder.can_record(device):
        return BackendError(f"CUDA graphs need a CUDA device, got {device.type}; {way}")
    if session.backend != "triton":
        return BackendError(f"CUDA graphs need the triton backend, got {session.backend}; {way}")
    reasons = {
        f"policy {session.policy_name}, which selects with more than the evidence": (
            policy.selects_after and not policy.chooses and not isinstance(policy, EvidencePolicy)
        ),
        "forward hooks in the model, which a replay does not call": session.next_step is not None
        and any(has_hooks(module) for module in session.model.modules() if module is not session.model),
        "layers with a state in a lossless run, which padding of drafts would enter": (
            session.engine.lossless and any(shape.state_bytes for shape in session.shapes())
        ),
        **common_reasons(session),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), "")
    return ConfigError(f"CUDA graphs must be off with {reason}; {way}") if reason else None


def common_reasons(session: Session) -> dict[str, bool]:
    """Return what neither a graph nor a compiled step can do, and whether a session asks for it."""
    return {
        "an audit of every step": session.audit is not None and session.audit.every == 1,
        "spans inside the step, as trace.spans=true records": EVERY_SPAN in session.observer.wants,
    }
