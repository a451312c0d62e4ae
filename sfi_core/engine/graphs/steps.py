"""Decoding steps that are replayed: the device's work as a CUDA graph, the host's bookkeeping beside it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from sfi_core.engine.forward import FreshDescriptors
from sfi_core.engine.graphs.buffers import StepBuffers
from sfi_core.engine.graphs.layer import attend_replayed, note_step
from sfi_core.engine.graphs.lookahead import foresee
from sfi_core.engine.graphs.recorder import Recorder, Work
from sfi_core.engine.meter import WHOLE_STEP
from sfi_core.engine.run import Run
from sfi_core.errors import BackendError
from sfi_core.observers.events import SelectionEvent
from sfi_core.observers.observer import wants
from sfi_core.policies.base import Selection
from sfi_core.state.side import Side
from sfi_kernels.step_descriptor import sent

# runs the model on tokens and positions, [B, 1] each, and returns the logits, [B, V]; counts no token
ForwardPass = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A step that was recorded.

    Attributes:
        replay: Does the device's work.
        logits_BV: Where it leaves the logits.
        selections: Where it leaves what the layers selected, by layer.
        launches: Kernels that it launches, by name and layer.
        side: Holds the events that order its two streams.
    """

    replay: Work
    logits_BV: torch.Tensor
    selections: dict[int, Selection]
    launches: Counter[tuple[str, int]]
    side: Side


class StepGraphs:
    """The decoding steps of one run, recorded once for each number of slow requests, rounded up.

    A step has two parts. The device's reads and writes buffers that stay where they are, the same kernels in
    the same order every time; it is recorded. The host's plans the step, describes it in those buffers, and
    notes what it did.

    Attributes:
        given_up: Whether the model turned out to wait for the device within a step; use it no more.
    """

    def __init__(
        self, run: Run, forward: ForwardPass, recorder: Recorder, *, required: bool
    ) -> None:
        """Take over a run's decoding steps.

        Args:
            run: The run, after its prefill.
            forward: The host's forward pass.
            recorder: Records the device's work.
            required: Whether a model that waits for the device is an error.
        """
        self._run, self._forward, self._recorder, self._required = run, forward, recorder, required
        self.given_up = False
        self._buffers = StepBuffers.of(run.store, run.policy, run.device)
        run.descriptors, run.attend = self._buffers, partial(attend_replayed, self._buffers)
        self._token_B1 = torch.zeros(run.store.batch, 1, dtype=torch.long, device=run.device)
        self._logits_BV = torch.empty(0)
        self._launches: Counter[tuple[str, int]] = Counter()
        self._graphs: dict[int, StepGraph] = {}
        self._wants = wants(run.observer, SelectionEvent)

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode one token of every request; return the logits, [B, V], which the next step overwrites.

        Raises:
            BackendError: The model waits for the device within a step, and graphs are required.
        """
        run, buffers = self._run, self._buffers
        run.begin_decode()  # describes the step into the buffers, and finds out whether `ahead` launched it
        key = buffers.refreshes
        if not buffers.launched:
            sent(torch.tensor(token_B)[:, None], run.device, self._token_B1)
            if key not in self._graphs:
                self._graphs[key] = self._captured()
            self._graphs[key].replay()
        graph = self._graphs[key]
        self._note(graph)
        run.meter.count("graph.ahead", buffers.launched)
        run.meter.count("graph.eager" if self.given_up else "graph.replay")
        if self.given_up:
            run.descriptors = FreshDescriptors(run.policy, run.store, run.device)
            run.attend = None
        return graph.logits_BV

    def ahead(self, token_B: torch.Tensor) -> None:
        """Launch the next step before its tokens are read, as far as it can be foreseen.

        Where it turns out to be another one, its row given to a new request, `step` does it again. That
        writes all that this wrote: the same keys at the same places. Only slow requests write their segments,
        and a request that was slow ahead either is slow in the step itself, or has left.

        Args:
            token_B: The tokens, still on the device.
        """
        known = None if self.given_up else foresee(self._run)
        if known is None or self._buffers.key(known(dense=False)) not in self._graphs:
            return
        self._buffers.write(known, ahead=True)
        self._token_B1.copy_(token_B[:, None])
        self._graphs[self._buffers.refreshes].replay()

    def _captured(self) -> StepGraph:
        run = self._run
        kernels, maintenance = run.meter.kernels, run.maintenance
        try:
            try:
                replay = self._recorder(self._work)
            except BackendError:
                if self._required:
                    raise
                self._work()
                replay, self.given_up = _nothing, True
            selections, side = self._buffers.selections, run.maintenance.side
            return StepGraph(replay, self._logits_BV, selections, self._launches, side)
        finally:
            run.meter.kernels, run.maintenance = kernels, maintenance

    def _work(self) -> None:
        # the step is planned and described: what is captured is the device's part of it
        run, buffers = self._run, self._buffers
        run.meter.kernels, run.maintenance = Counter(), run.maintenance.again()
        with run.launches(WHOLE_STEP):
            buffers.begin()
        position_B1 = (buffers.descriptor.length_B - 1).clamp_min(0).long()[:, None]
        with run.launches(WHOLE_STEP):
            self._logits_BV = self._forward(self._token_B1, position_B1)
        run.maintenance.join()
        self._launches = Counter()
        for (name, _, layer), count in run.meter.kernels.items():
            self._launches[name, layer] += count

    def _note(self, graph: StepGraph) -> None:
        run = self._run
        for (name, layer), count in graph.launches.items():
            run.meter.kernels[name, run.step, layer] += count
        kept = {layer: _kept(one, copy=self._wants) for layer, one in graph.selections.items()}
        note_step(run, kept, self._buffers.places)


def _nothing() -> None:
    pass


def _kept(selection: Selection, *, copy: bool) -> Selection:
    # an observer may look at it when the next step has begun
    if not copy:
        return selection
    diagnostics = {name: value.clone() for name, value in selection.diagnostics.items()}
    return replace(selection, index_BHK=selection.index_BHK.clone(), diagnostics=diagnostics)
