"""Decoding steps that are replayed: the device's work as a CUDA graph, the host's bookkeeping beside it."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from sfi_core.engine.graphs.buffers import FixedStep
from sfi_core.engine.graphs.layer import note_step
from sfi_core.engine.graphs.lookahead import foresee
from sfi_core.engine.graphs.recorder import Recorder, Work
from sfi_core.engine.maintenance import Side
from sfi_core.errors import BackendError
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.hosts.transformers.session import Session
from sfi_core.observers.observer import hears
from sfi_core.policies.base import Selection
from sfi_kernels.step_descriptor import sent


@dataclass(frozen=True, slots=True)
class Recorded:
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


class GraphedSteps:
    """The decoding steps of one run, recorded once for each number of slow requests, rounded up.

    A step has two parts. The device's reads and writes buffers that stay where they are, the same kernels in
    the same order every time; it is recorded. The host's plans the step, describes it in those buffers, and
    notes what it did.

    Attributes:
        given_up: Whether the model turned out to wait for the device within a step; use it no more.
    """

    def __init__(
        self,
        model: Any,
        session: Session,
        cache: SfiCache,
        recorder: Recorder,
        options: dict[str, Any],
    ) -> None:
        run = session.run
        self._model, self._session, self._cache = model, session, cache
        self._run, self._record, self._options = run, recorder, options
        self.given_up = False
        self._fixed = run.fixed = FixedStep.of(run.cache, run.policy, run.device)
        self._token_B1 = torch.zeros(run.cache.batch, 1, dtype=torch.long, device=run.device)
        self._logits_BV = torch.empty(0)
        self._launches: Counter[tuple[str, int]] = Counter()
        self._steps: dict[int, Recorded] = {}
        self._wants = hears(run.observer, "on_selection")

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode one token of every request; return the logits, [B, V], which the next step overwrites.

        Raises:
            BackendError: The model waits for the device within a step, and graphs were asked for.
        """
        run = self._run
        run.begin_decode()
        key = self._fixed.refreshes
        if not self._fixed.launched:
            sent(torch.tensor(token_B)[:, None], run.device, self._token_B1)
            if key not in self._steps:
                self._steps[key] = self._recorded()
            self._steps[key].replay()
        recorded = self._steps[key]
        self._note(recorded)
        run.paths["graph.ahead"] += self._fixed.launched
        run.paths["graph.eager" if self.given_up else "graph.replay"] += 1
        if self.given_up:
            run.fixed = None
        return recorded.logits_BV

    def ahead(self, token_B: torch.Tensor) -> None:
        """Launch the next step before its tokens are read, as far as it can be foreseen.

        Where it turns out to be another one, its row given to a new request, `step` does it again: that
        writes all that this wrote, the same keys at the same places. Segments are written for slow requests
        only, and one that was slow ahead is slow, or has left.

        Args:
            token_B: The tokens, still on the device.
        """
        known = None if self.given_up else foresee(self._run)
        if known is None or self._fixed.key(known(dense=False)) not in self._steps:
            return
        self._fixed.write(known, ahead=True)
        self._token_B1.copy_(token_B[:, None])
        self._steps[self._fixed.refreshes].replay()

    def _recorded(self) -> Recorded:
        run = self._run
        kernels, maintenance = run.kernels, run.maintenance
        try:
            try:
                replay = self._record(self._work)
            except BackendError:
                if self._session.engine.graphs:
                    raise
                self._work()
                replay, self.given_up = _nothing, True
            return Recorded(
                replay,
                self._logits_BV,
                self._fixed.selections,
                self._launches,
                run.maintenance.side,
            )
        finally:
            run.kernels, run.maintenance = kernels, maintenance

    def _work(self) -> None:
        run, fixed, seen = self._run, self._fixed, self._cache.seen
        run.kernels, run.maintenance = Counter(), run.maintenance.again()
        with run.counted(-1):
            fixed.begin()
        self._cache.attach(run)
        self._session.stands_by = True
        try:
            output = self._model(
                input_ids=self._token_B1,
                position_ids=(fixed.descriptor.length_B - 1).clamp_min(0).long()[:, None],
                past_key_values=self._cache,
                use_cache=True,
                **self._options,
            )
        finally:
            self._session.stands_by = False
            self._cache.see(seen)  # `update` has counted the token, as it does each time
        run.maintenance.join()
        self._logits_BV = output.logits[:, -1]
        self._launches = Counter()
        for (name, _, layer), count in run.kernels.items():
            self._launches[name, layer] += count

    def _note(self, recorded: Recorded) -> None:
        run = self._run
        self._cache.see(self._cache.seen + 1)
        for (name, layer), count in recorded.launches.items():
            run.kernels[name, run.step, layer] += count
        kept = {layer: _kept(one, copy=self._wants) for layer, one in recorded.selections.items()}
        note_step(run, kept, self._fixed.places)


def _nothing() -> None:
    pass


def _kept(selection: Selection, *, copy: bool) -> Selection:
    # an observer may look at it when the next step has begun
    if not copy:
        return selection
    diagnostics = {name: value.clone() for name, value in selection.diagnostics.items()}
    return replace(selection, index_BHK=selection.index_BHK.clone(), diagnostics=diagnostics)
