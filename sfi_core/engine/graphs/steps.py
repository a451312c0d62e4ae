"""Replayed decoding steps: the device's work as a CUDA graph, the host's bookkeeping beside it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from sfi_core.engine.audit import Audit
from sfi_core.engine.batch_pass import FreshDescriptors
from sfi_core.engine.graphs.buffers import StepBuffers
from sfi_core.engine.graphs.layer import attend_replayed, note_step
from sfi_core.engine.graphs.lookahead import foresee
from sfi_core.engine.graphs.recorder import Recorder, Work
from sfi_core.engine.meter import WHOLE_STEP, ByLayer, Launches, Recorded
from sfi_core.engine.run import Run
from sfi_core.errors import BackendError
from sfi_core.observers.events import SelectionEvent
from sfi_core.observers.observer import AHEAD, Observers, wants
from sfi_core.policies.base import Selection
from sfi_core.state.side_stream import SideStream
from sfi_kernels.step_descriptor import sent

# runs the model on tokens and positions, [B, 1] each, and returns the logits, [B, V]; counts no token
ForwardPass = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A step that was recorded, or that ran kernel by kernel.

    `logits_BV` and, by layer, `selections` are its buffers. `side` is kept because it holds the events that
    order the graph's two streams. `replay` repeats the device's work; None for a step that was not recorded.
    """

    logits_BV: torch.Tensor
    selections: dict[int, Selection]
    launches: Recorded
    side: SideStream
    replay: Work | None = None


class StepGraphs:
    """The decoding steps of one run, recorded once for each number of slow requests, rounded up.

    The device's part of a step launches the same kernels on the same buffers every time; it is recorded. The
    host's part plans the step, describes it in those buffers, and afterwards updates counts and states.

    Attributes:
        given_up: Why recording failed, after which this object must not be used; "" otherwise.
    """

    def __init__(
        self, run: Run, forward: ForwardPass, recorder: Recorder, *, required: bool, patient: bool = True
    ) -> None:
        """Take over a run's decoding steps.

        The run is after its prefill. If `required`, a model that waits for the device is an error. If
        `patient`, a number of slow requests above 0 is recorded only when it comes for the second time:
        recording takes as long as three steps.
        """
        self._run, self._forward, self._recorder, self._required = run, forward, recorder, required
        self.given_up = ""
        self._buffers = StepBuffers.of(run.store, run.policy, run.device)
        if run.audit is not None:
            self._buffers.queries = {}
        self._keeps = False  # whether the last step left its queries in the buffers
        self._take_over()
        self._token_B1 = torch.zeros(run.store.batch, 1, dtype=torch.long, device=run.device)
        self._logits_BV = torch.empty(0)
        self._launches: ByLayer = ByLayer()
        self._graphs: dict[int, StepGraph] = {}
        self._needed: set[int] | None = {0} if patient else None
        self._wants = wants(run.observer, SelectionEvent)

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode one token of every request; return the logits, [B, V], which the next step overwrites.

        The run has begun the step: it is described in the buffers, and known whether `ahead` launched it.
        Raise `BackendError` if the model waits for the device within a step, and graphs are required.
        """
        run, buffers = self._run, self._buffers
        if buffers.launched:
            done = self._graphs[buffers.refreshes]
        else:
            with run.observer.span("forward"):
                sent(torch.tensor(token_B)[:, None], run.device, self._token_B1)
                done = self._do(buffers.refreshes)
        self._keeps = True
        self._note(done)
        run.meter.replayed = done.replay is not None
        run.meter.count("graph.ahead", buffers.launched)
        run.meter.count("graph.replay" if done.replay else "graph.eager")
        if self.given_up:
            self._hand_back()
        return done.logits_BV

    @contextmanager
    def eager_step(self) -> Iterator[None]:
        """Run the step in the body without graphs, so that the watchers see its layers: an audited step."""
        run, options = self._run, self._run.engine
        self._buffers.forget()
        self._hand_back()
        run.engine = replace(options, graphs=None)
        try:
            yield
        finally:
            run.engine = options
            self._take_over()

    def _take_over(self) -> None:
        run, buffers = self._run, self._buffers
        run.descriptors, run.attend = buffers, partial(attend_replayed, buffers)

    def _hand_back(self) -> None:
        run, queries = self._run, self._buffers.queries
        run.descriptors = FreshDescriptors(run.store, run.device)
        run.attend = None
        for watcher in run.watchers:
            if self._keeps and queries is not None and isinstance(watcher, Audit):
                watcher.take_queries(run.requests, queries)
        self._keeps = False

    def ahead(self, token_B: torch.Tensor) -> None:
        """Launch the next step, if it can be foreseen, before the host reads its tokens.

        If the step turns out differently (a new request took a row), `step` runs it again and overwrites all
        that this launch wrote: keys go to the same places, and a request whose segment this launch wrote, a
        slow one, is slow in the step itself too or has left. The tokens are still on the device.
        """
        known = None if self.given_up else foresee(self._run)
        if known is None:
            return
        graph = self._graphs.get(self._buffers.key(known.own))
        if graph is not None and graph.replay is not None:
            with self._run.observer.span(AHEAD):
                self._buffers.write(known, ahead=True)
                self._token_B1.copy_(token_B[:, None])
                graph.replay()

    def _do(self, key: int) -> StepGraph:
        if key not in self._graphs:
            if self._needed is not None and key not in self._needed:
                self._needed.add(key)
                return self._unrecorded()
            try:
                self._graphs[key] = self._recorded()
            except BackendError as error:
                if self._required:
                    raise
                self.given_up = str(error)
                return self._unrecorded()
        graph = self._graphs[key]
        assert graph.replay is not None, "it was recorded"
        graph.replay()
        return graph

    def _recorded(self) -> StepGraph:
        with self._apart():
            replay = self._recorder(self._work)
            graph = replace(self._left(), replay=replay)
        self._run.meter.kernels.recorded.append(graph.launches)
        return graph

    def _unrecorded(self) -> StepGraph:
        with self._apart():
            self._work()
            return self._left()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        # the work uses counters, a ring and events of its own, and no spans
        run = self._run
        kernels, maintenance, observer = run.meter.kernels, run.maintenance, run.observer
        run.observer = Observers([observer], spans=False)
        try:
            yield
        finally:
            run.meter.kernels, run.maintenance, run.observer = kernels, maintenance, observer

    def _left(self) -> StepGraph:
        selections, side = self._buffers.selections, self._run.maintenance.side
        return StepGraph(self._logits_BV, selections, Recorded(self._launches), side)

    def _work(self) -> None:
        # the device's part of a step that the host has described
        run, buffers = self._run, self._buffers
        run.meter.kernels, run.maintenance = Launches(), run.maintenance.again()
        with run.launches(WHOLE_STEP):
            buffers.begin()
        position_B1 = (buffers.descriptor.length_B - 1).clamp_min(0).long()[:, None]
        with run.launches(WHOLE_STEP):
            self._logits_BV = self._forward(self._token_B1, position_B1)
        run.maintenance.join()
        self._launches = run.meter.kernels.total()

    def _note(self, done: StepGraph) -> None:
        run = self._run
        if done.replay is None:
            run.meter.kernels.add(done.launches.launches, run.step)
        else:
            run.meter.kernels.add_replay(done.launches, run.step)
        kept = {layer: _kept(one, copy=self._wants) for layer, one in done.selections.items()}
        note_step(run, kept, self._buffers.places)


def _kept(selection: Selection, *, copy: bool) -> Selection:
    # copied for observers, which may look at the selection when the next step has begun
    if not copy:
        return selection
    diagnostics = {name: value.clone() for name, value in selection.diagnostics.items()}
    return replace(selection, index_BHK=selection.index_BHK.clone(), diagnostics=diagnostics)
