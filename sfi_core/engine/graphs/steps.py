"""Replayed decoding steps: the device's work as a CUDA graph, the host's bookkeeping beside it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from sfi_core.engine import select
from sfi_core.engine.attend import count_attention, prepare_layers, read
from sfi_core.engine.audit import Audit
from sfi_core.engine.batch_pass import Descriptors, Rows, SeenLayer
from sfi_core.engine.graphs.buffers import Kind, Recalls, Selections, StepBuffers, foresee
from sfi_core.engine.graphs.recorder import Recorder, Work
from sfi_core.engine.layer import Layer
from sfi_core.engine.run import Run
from sfi_core.errors import BackendError
from sfi_core.observers.events import RecallEvent, SelectionEvent
from sfi_core.observers.observer import AHEAD, Observers
from sfi_core.policies.base import Selection
from sfi_core.state.side_stream import SideStream
from sfi_kernels.step_descriptor import sent

# runs the model on tokens and positions, [B, W] each, and returns the logits, [B, W, V]; counts no token
ForwardPass = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A step that was recorded, so that `replay` repeats the device's work, or that ran kernel by kernel."""

    selections: Selections
    recalls: Recalls
    launches: Counter[str]
    sides: tuple[SideStream, ...]  # hold the events that order the graph's streams
    replay: Work | None = None

    def repeat(self) -> None:
        """Replay the step."""
        assert self.replay is not None, "it was recorded"
        self.replay()


class StepGraphs:
    """The decoding steps of one run, recorded once for each `Kind`: tokens and slow requests, rounded up.

    A request that brings fewer tokens than another has padding before them, whose keys are not kept and whose logits
    nobody reads. The device's part of a step launches the same kernels on the same buffers every time; it is recorded.
    The host's part plans the step, describes it in those buffers, and afterwards updates counts and states.
    `given_up` says why recording failed, after which this object must not be used.
    """

    def __init__(
        self, run: Run, forward: ForwardPass, recorder: Recorder, *, required: bool, patient: bool = True
    ) -> None:
        """Take over a run's decoding steps, after its prefill; if `required`, a model must not wait for the device.

        If `patient`, only plain fast steps are recorded at the first of a kind: recording takes as long as three steps.
        """
        self._run, self._forward, self._recorder, self._required = run, forward, recorder, required
        self.given_up = ""
        most = 1 + run.policy.config.draft.max_tokens * run.engine.lossless
        self._buffers = StepBuffers(run.store, run.device, policy=run.policy, most=most)
        if run.audit is not None:
            self._buffers.queries = {}
        self._keeps = False  # whether the last step left its queries in the buffers
        self._take_over()
        self._token_X = torch.zeros(run.store.batch * most, dtype=torch.long, device=run.device)
        self._position_B1: torch.Tensor | None = None  # of a loop that gives them
        self._logits_XV: torch.Tensor | None = None
        self._graphs: dict[Kind, StepGraph] = {}
        self._needed: set[Kind] | None = {Kind(chooses=run.policy.chooses)} if patient else None
        self._wants = SelectionEvent in run.observer.wants
        self._brought: Recalls = []  # by the first run of a step that is recorded: its repetitions find the rows there

    def give(self, token_B1: torch.Tensor, position_B1: torch.Tensor | int) -> None:
        """Take another loop's tokens and positions, on the device, for the step that the run has begun.

        `position_B1` may have one row, or be a number, for all. Once given, positions must be given for every step.
        """
        self._token_BW.copy_(token_B1)
        if self._position_B1 is None:
            self._position_B1 = torch.zeros_like(self._token_BW)
        if isinstance(position_B1, int):
            self._position_B1.fill_(position_B1)
        else:
            self._position_B1.copy_(position_B1)

    def step(self, brought: Sequence[Sequence[int]] = (), unread_N: torch.Tensor | None = None) -> torch.Tensor:
        """Decode the tokens that the requests bring, at least one each, in a step that the run has begun.

        None are brought where `give` has them. A token of -1 - n is number n of `unread_N`, on the device.
        Return the logits, [B * W, V], which the next step overwrites; a request's own are the last of W. Raise
        `BackendError` if the model waits for the device within a step, and graphs are required.
        """
        run, buffers = self._run, self._buffers
        if buffers.launched:
            done = self._graphs[buffers.kind]
        else:
            prepare_layers(run, run.batch_pass.fast, run.requests)
            with run.observer.span("forward"):
                W = buffers.descriptor.queries
                if padded := [[*[row[0]] * (W - len(row)), *row] for row in brought]:
                    token_BW = sent(torch.tensor(padded), run.device, self._token_BW)
                    if unread_N is not None:
                        taken_BW = unread_N[(-1 - token_BW).clamp_min(0)]
                        token_BW.copy_(torch.where(token_BW < 0, taken_BW, token_BW))
                done = self._do(buffers.kind)
        self._keeps = True
        self._note(done)
        run.meter.replayed = done.replay is not None
        run.meter.count("graph.ahead", buffers.launched)
        run.meter.count("graph.replay" if done.replay else "graph.eager")
        if self.given_up:
            self.leave()
        assert self._logits_XV is not None, "a step has run"
        return self._logits_XV[: self._token_BW.numel()]

    @contextmanager
    def eager_step(self) -> Iterator[None]:
        """Run the pass in the body without graphs, so that the watchers see its layers: an audited step."""
        self._buffers.ahead = False
        self.leave()
        try:
            yield
        finally:
            self._take_over()

    def _take_over(self) -> None:
        run, buffers = self._run, self._buffers
        run.store.join()  # a graph waits for nothing outside
        run.descriptors, run.attend = buffers, partial(attend_recorded, buffers)

    def leave(self) -> None:
        """Hand the run's passes back to its own attention."""
        run, queries = self._run, self._buffers.queries
        run.descriptors = Descriptors(run.store, run.device)
        run.attend = None
        for watcher in run.watchers:
            if self._keeps and queries is not None and isinstance(watcher, Audit):
                watcher.take_queries(run.requests, queries)
        self._keeps = False

    def ahead(self, token_B: torch.Tensor) -> None:
        """Launch the next step, if it can be foreseen, before the host reads its tokens from the device.

        If the step turns out differently (a new request took a row), `step` runs it again and overwrites all that this
        launch wrote: keys go to the same places, and a slow request, whose segment it wrote, is slow again or has left.
        """
        foreseen = None if self.given_up else foresee(self._run)
        if foreseen is None:
            return
        known, states = foreseen
        self._buffers.write(known, ahead=True)
        graph = self._graphs.get(self._buffers.kind)
        if graph is None:
            self._buffers.ahead = False
            return
        prepare_layers(self._run, self._buffers.descriptor.fast, states)
        with self._run.observer.span(AHEAD):
            self._token_BW.copy_(token_B[:, None])
            graph.repeat()

    def _do(self, kind: Kind) -> StepGraph:
        if kind not in self._graphs:
            ranks = self._run.ranks
            ranks.check_same({"kind of step": kind})
            if self._needed is not None and kind not in self._needed:
                self._needed.add(kind)
                return self._run_once()
            try:
                with ranks.agreed():
                    recorded = self._run_once(records=True)
                self._graphs[kind] = recorded
            except BackendError as error:
                if self._required:
                    raise
                self.given_up = str(error)
                return self._run_once()
        self._graphs[kind].repeat()
        return self._graphs[kind]

    @property
    def _token_BW(self) -> torch.Tensor:
        step = self._buffers.descriptor
        return self._token_X[: step.batch * step.queries].view(step.batch, -1)

    def _run_once(self, *, records: bool = False) -> StepGraph:
        # the work uses counters, a ring and events of its own, and no spans
        run, replay, buffers = self._run, None, self._buffers
        kernels, maintenance, observer, side = run.meter.kernels, run.maintenance, run.observer, run.store.side
        early = run.side
        began = time.perf_counter()
        run.observer = Observers([observer], spans=False)
        try:
            if records:
                with self._packed_rows_kept():
                    replay = self._recorder(self._work)
            else:
                self._work()
            sides = run.maintenance.side, run.store.side, run.side
            return StepGraph(buffers.selections, buffers.recalls, run.meter.kernels, sides, replay)
        finally:
            run.meter.kernels, run.maintenance, run.observer, run.store.side = kernels, maintenance, observer, side
            run.side = early
            run.meter.recording_seconds += time.perf_counter() - began

    @contextmanager
    def _packed_rows_kept(self) -> Iterator[None]:
        # a recorder does the work more than once, but a mixed slow step, and one that packs the next step's rows, packs
        # over the rows that it reads
        run, step = self._run, self._buffers.descriptor
        rows = (step.slow if run.policy.mixes_heads else ()) + (step.fast if run.packs_ahead else ())
        before = {(layer, row): run.segments[layer].position_BHS[row].clone() for layer in run.segments for row in rows}
        try:
            yield
        finally:
            for (layer, row), position_HS in before.items():
                only = run.rows((row,))
                index_1HK = position_HS[None, :, only.most_sink :].contiguous()
                segment, into = run.segments[layer], (only.request_R, only.sink_R, index_1HK, only.most_sink)
                run.store.pack_into(segment, layer, *into)
            run.store.join()

    def _work(self) -> None:
        # the device's part of a step that the host has described
        run, buffers = self._run, self._buffers
        run.meter.kernels, run.maintenance, run.store.side = Counter(), run.maintenance.again(), run.store.side.again()
        run.side = run.side.again()
        with run.launches():
            buffers.begin()
        token_BW, step = self._token_BW, buffers.descriptor
        position_BW = self._position_B1
        if position_BW is None:
            place_W = torch.arange(-step.queries, 0, device=run.device)
            position_BW = (step.length_B[:, None] + place_W).clamp_min(0)
        with run.launches():
            logits_XV = self._forward(token_BW, position_BW).flatten(0, 1)
        if self._logits_XV is None:  # not inside a capture: a recorder first runs the work unrecorded
            self._logits_XV = logits_XV.new_empty(len(self._token_X), logits_XV.shape[1])
        self._logits_XV[: len(logits_XV)].copy_(logits_XV)
        run.maintenance.join()
        run.store.join()
        buffers.end()
        self._brought = self._brought or buffers.recalls

    def _note(self, done: StepGraph) -> None:
        run = self._run
        run.meter.kernels.update(done.launches)
        selections = done.selections
        if self._wants:  # observers may look at a selection when the next step has begun
            selections = {layers: [selection.copy() for selection in several] for layers, several in selections.items()}
        note_step(run, selections, self._buffers.places, self._brought or done.recalls)
        self._brought = []


def attend_recorded(buffers: StepBuffers, layer: SeenLayer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    """Attend as an eager decoding step does; host data that changes by step is in the buffers."""
    assert isinstance(layer, Layer), "the engine's own"
    run, rows = layer.run, buffers.rows
    step = buffers.dense if layer.left_dense else buffers.descriptor
    assert step is not None, "the pass has been described"
    last_BHG1D = query_BHGTD[:, :, :, -1:]  # a fast request has no other
    buffers.keep(layer.index, last_BHG1D[:, :, :, 0])
    with run.launches():
        pseudo, bring = None, list[Selection]()
        if layer.chooses:
            chosen, pseudo = select.choose(layer, step, last_BHG1D, step.longest)
            if chosen:
                buffers.selections[layer.index,] = chosen
            bring = [] if layer.in_place else chosen
        chosen_rows = buffers.chosen
        for selection in bring[:1]:
            assert chosen_rows is not None, "the step chooses"
            buffers.keep_recall(layer.index, select.pack((layer,), chosen_rows, selection))
        result = read(layer, step, query_BHGTD, pseudo=pseudo)
        for selection in bring[1:]:  # for the next step
            assert chosen_rows is not None, "the step chooses"
            buffers.keep_recall(layer.index, select.pack((layer,), chosen_rows, selection))
    if result.logits_BHGWT is not None:
        assert rows is not None, "the step refreshes"
        handed = select.Handed(layer, result.logits_BHGWT, result.log_sum_BHGW)
        select.submit(handed, partial(_select, buffers, rows), ())
    return result.out_BHGWE


def _select(buffers: StepBuffers, rows: Rows, handed: list[select.Handed]) -> None:
    layers = [each.layer for each in handed]
    with layers[0].run.launches():
        selection = select.select(layers, rows, None, select.joined(handed))
        assert selection is not None, "a policy that needs only the evidence selects"
        buffers.keep_recall(layers[0].index, select.pack(layers, rows, selection))
    buffers.selections[tuple(layer.index for layer in layers)] = [selection]


def note_step(run: Run, selections: Selections, places: Mapping[int, int], recalls: Recalls) -> None:
    """Update counts and states after a replayed step, and tell the observer; `places` has slow rows' in selections."""
    batch_pass, slow = run.batch_pass, run.batch_pass.descriptor.slow
    if run.policy.chooses:
        places = {row: row for row in batch_pass.descriptor.fast}
    for recalled, recall in recalls:
        if RecallEvent in run.observer.wants:  # observers may look at the numbers when the next step has begun
            recall = replace(recall, rows_RH=recall.rows_RH.clone())  # noqa: PLW2901
        run.tell_recall(recalled, places, recall)
    for layer in run.layers:
        left_dense = layer in run.policy.config.dense_layers
        count_attention(run, batch_pass.descriptor_of(left_dense=left_dense), layer)
    for layers, several in sorted(selections.items()):
        if run.policy.chooses:
            select.note_choice(run, layers[0], several, batch_pass.descriptor.fast)
            continue
        (selection,) = several
        full = {row: places[row] for row in slow if select.has_candidates(run, row)}
        bare = {row: 0 for row in slow if row not in full}
        run.meter.count("triton.pack", len(layers) * len(slow))
        run.meter.count("triton.selector", len(layers) * len(full))
        select.note(run, layers, bare, Selection(selection.index_BHK[:, :, :0]))
        select.note(run, layers, full, selection)
