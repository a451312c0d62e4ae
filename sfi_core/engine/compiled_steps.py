"""Decoding steps on a CPU as one compiled call a thread, in place of the model's modules and the engine's layers."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from sfi_core.engine.attend import attend, prepare_layers
from sfi_core.engine.audit import Audit
from sfi_core.engine.layer import Layer
from sfi_core.engine.run import Run
from sfi_core.engine.select import Handed, hand_over, note
from sfi_core.machine.threads import one_thread
from sfi_core.observers.events import SelectionEvent
from sfi_core.policies.base import EvidencePolicy, Selection
from sfi_kernels.compiled import CORES, KINDS, pool
from sfi_kernels.tables import BLOCK, OUT, STAGES, TICKETS, Real, Stage, Step
from sfi_kernels.tables import Layer as Word

_turn = Lock()  # threads of a step wait for each other: two runs must not share the pool, which has a thread a core
PART = 512  # tokens of a part of dense attention, at least
EVIDENCE = 1 << 24  # logits of slow requests that one call leaves, unless one layer has more


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A model as compiled steps read it: the tables of `tables`, whose tensors `holds` keeps.

    `embed` returns hidden states, [1, X, I] float32, of token ids; `turn` cosines and sines of positions, [rotations,
    X, D] each; `finish` turns the output matrix' results into logits.
    """

    layer_LX: Any
    step_X: Any
    real_X: Any
    embed: Callable[[torch.Tensor], torch.Tensor]
    turn: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    finish: Callable[[torch.Tensor], torch.Tensor]
    holds: Any


class Windows(Protocol):
    """The sliding windows of the host's layers."""

    layers: list[int]

    def locate(self, table_LX: Any, length: int) -> None:
        """Write where the layers' rows are for a step that appends the last of `length` tokens."""

    def leave(self) -> None:
        """Let the host's modules go on with the windows."""


class CompiledSteps:
    """The decoding steps of one run, shared by `threads`; the engine attends where more than the evidence selects."""

    given_up = ""

    def __init__(self, run: Run, model: StepModel, threads: int, windows: Windows) -> None:
        self._windows = windows
        self._run, self._model, self._threads = run, model, min(threads, CORES)
        self._step_X, self._layer_LX, self._real_X = model.step_X.copy(), model.layer_LX.copy(), model.real_X.copy()
        policy = run.policy
        evidence = isinstance(policy, EvidencePolicy) and not (policy.mixes_heads or policy.chooses)
        alone = policy.coded or evidence
        self._attends = alone or not policy.selects
        self._step_X[Step.PART] = PART if self._attends else np.iinfo(np.int64).max
        self._real_X[Real.REST] = policy.config.codescan.rest
        self._layers = [layer for layer in range(len(self._layer_LX)) if layer not in windows.layers]
        self._sparse = [layer for layer in self._layers if layer not in policy.config.dense_layers]
        self._layer_LX[:, Word.LEFT_DENSE] = 1
        self._layer_LX[self._sparse, Word.LEFT_DENSE] = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._room: tuple[int, ...] = ()  # what decides the buffers' sizes
        self._known: list[Any] = []  # tensors whose addresses the tables have
        self._keeps = False  # whether the last step left its queries for an audit

    def step(self, brought: Sequence[Sequence[int]]) -> torch.Tensor:
        """Decode the tokens that the requests bring, one each at least; return logits, [B * W, V], the last of W."""
        run, count = self._run, self._run.batch_pass.count
        tokens = [list(row[len(row) - new :]) for row, new in zip(brought, count, strict=True)]
        with run.observer.span("forward"):
            self._prepare()
            logits_XV = self._forward(tokens)
        self._keeps = run.audit is not None and self._attends  # else it has seen them
        run.maintenance.join()
        W = max(map(len, brought))
        if all(len(row) == W for row in tokens):
            return logits_XV
        parts = torch.split(logits_XV, [len(row) for row in tokens])
        return torch.cat([pad(part, (0, 0, W - len(part), 0)) for part in parts])

    def ahead(self, token_B: torch.Tensor) -> None:
        """Do nothing: a CPU has no time of its own."""

    @contextmanager
    def eager_step(self) -> Iterator[None]:
        """Run the step in the body module by module: an audited one."""
        for watcher in self._run.watchers:
            if self._keeps and isinstance(watcher, Audit):
                queries = self._buffers["queries"]
                watcher.take_queries(self._run.requests, {layer: queries[layer] for layer in self._layers})
        self._keeps = False
        self._windows.leave()
        yield

    def _prepare(self) -> None:
        # let the policy learn what its requests lack, and look where the layers' tensors are
        run, group = self._run, int(self._step_X[Step.GROUP])
        run.store.grow(run.batch_pass.longest)
        run.layers.update(self._layers)
        if run.policy.coded:
            run.policy.key_width = int(self._step_X[Step.WIDTH])
            for index in self._sparse:
                run.keep(index, group)
            prepare_layers(run, run.batch_pass.fast, run.requests)
        tensors = [run.store.pages(index).key_PHND for index in self._layers]
        if self._attends and (run.policy.selects or run.batch_pass.fast):
            tensors += [run.segment(index).position_BHS for index in self._sparse]
        tensors += [run.kept[index].word_BHWT for index in self._sparse if run.policy.coded]
        if len(tensors) != len(self._known) or any(a is not b for a, b in zip(tensors, self._known, strict=True)):
            self._known = tensors
            self._locate()

    def _locate(self) -> None:
        run, table_LX = self._run, self._layer_LX
        for index in self._layers:
            pages = run.store.pages(index)
            table_LX[index, [Word.KEYS, Word.VALUES, Word.NORMS]] = [x.data_ptr() for x in pages.tensors]
            if index not in run.segments or index not in self._sparse:
                continue
            segment = run.segment(index)
            where = [Word.PACKED_KEYS, Word.PACKED_VALUES, Word.POSITIONS, Word.LENGTHS]
            table_LX[index, where] = [x.data_ptr() for x in segment.tensors]
            table_LX[index, Word.ROWS] = segment.position_BHS.shape[2]
            if run.policy.coded:
                codes = run.kept[index]
                table_LX[index, Word.CODE_MEAN : Word.CODE_RECENT + 1] = [x.data_ptr() for x in codes]
                table_LX[index, Word.CODED] = codes.word_BHWT.shape[3]
        if run.policy.coded and self._sparse:
            codes = run.kept[self._sparse[0]]
            self._step_X[Step.WORDS] = codes.word_BHWT.shape[2]
            self._step_X[Step.BUDGET] = min(run.policy.config.budget, codes.word_BHWT.shape[3])

    def _forward(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        run, step, model = self._run, self._step_X, self._model
        start, ids = run.batch_pass.start, torch.tensor([token for row in tokens for token in row])
        places = [first + place for first, row in zip(start, tokens, strict=True) for place in range(len(row))]
        turns = model.turn(torch.tensor(places))
        held = [model.embed(ids[None])[0].float(), *turns, run.store.block_table_BP, run.batch_pass.descriptor.table_BX]
        held = [tensor.contiguous() for tensor in held]
        where = [Step.HIDDEN_XI, Step.COS, Step.SIN, Step.BLOCK_BP, Step.STEP_BX]
        step[where] = [tensor.data_ptr() for tensor in held]
        self._make_room(len(ids), max(map(len, tokens)))
        policy, slow = run.policy, run.batch_pass.slow
        step[Step.IN_PLACE], step[Step.CHOOSES] = run.in_place, policy.coded
        step[Step.DIAGNOSES] = SelectionEvent in run.observer.wants
        last = len(self._layer_LX) * STAGES + 1
        self._windows.locate(self._layer_LX, run.batch_pass.longest)
        if not self._attends:
            self._between_calls(last)
        elif not (slow and policy.refreshes() and self._sparse):
            self._layer_LX[:, Word.EVIDENCE] = 0
            self._call(0, last)
        else:
            self._with_evidence(last)
        if policy.coded and run.batch_pass.fast:
            self._note_choices()
        self._count()
        with one_thread(wanted=True):
            return model.finish(self._buffers["logits"].clone())  # the next step overwrites them

    def _with_evidence(self, last: int) -> None:
        # some layers at a time, whose slow requests' logits the policy then selects by
        run, step, batch_pass, begin = self._run, self._step_X, self._run.batch_pass, 0
        size = len(batch_pass.slow), int(step[Step.HEADS]), int(step[Step.GROUP]), batch_pass.longest
        together = max(1, EVIDENCE // int(np.prod(size)))
        for first in range(0, len(self._sparse), together):
            layers = self._sparse[first : first + together]
            logits_LRHGT = torch.empty(len(layers), *size)
            self._layer_LX[layers, Word.EVIDENCE] = [part.data_ptr() for part in logits_LRHGT]
            end = last if layers[-1] == self._sparse[-1] else (layers[-1] + 1) * STAGES
            self._call(begin, end)
            begin = end
            for index, logits_RHGT in zip(layers, logits_LRHGT, strict=True):
                layer = Layer(run, index, **run.options[index])
                for row, logits_HGT in zip(batch_pass.slow, logits_RHGT, strict=True):
                    logits_1HG1T = logits_HGT[None, :, :, None, : run.requests[row].length]
                    query_1HG1D = self._buffers["last"][row, None, :, :, None]  # their shape alone counts
                    hand_over(layer, (row,), query_1HG1D, Handed(layer, logits_1HG1T))

    def _between_calls(self, last: int) -> None:
        # a layer's first stages, the engine's attention, and the layer's other stages with the next one's first
        run, begin, count = self._run, 0, self._run.batch_pass.count
        H, G, D = (int(self._step_X[size]) for size in (Step.HEADS, Step.GROUP, Step.WIDTH))
        T = max(count)
        place_X2 = [(row, T - new + place) for row, new in enumerate(count) for place in range(new)]
        row_X, place_X = torch.tensor(place_X2).unbind(1)
        for index in self._layers:
            self._call(begin, index * STAGES + Stage.ATTEND)
            begin = index * STAGES + Stage.OUTPUT
            query_BTHGD = torch.zeros(len(count), T, H, G, D)
            query_BTHGD[row_X, place_X] = self._buffers["made"][:, : H * G * D].view(-1, H, G, D)
            out_BHGTE = attend(run, index, query_BTHGD.permute(0, 2, 3, 1, 4), **run.options[index])
            self._buffers["out"].copy_(out_BHGTE.permute(0, 3, 1, 2, 4)[row_X, place_X].flatten(1))
        self._call(begin, last)

    def _note_choices(self) -> None:
        run, heard = self._run, bool(self._step_X[Step.DIAGNOSES])
        rows = {row: row for row in run.batch_pass.fast}
        for index in self._sparse:
            choice = Selection(self._buffers["choice"][index])
            if heard:
                estimate_BH, margin_BH = self._buffers["unread"][index].unbind(-1)
                diagnostics = {"unread_estimate": estimate_BH, "score_margin": margin_BH}
                choice = Selection(choice.index_BHK, diagnostics).copy()
            note(run, (index,), rows, choice)

    def _count(self) -> None:
        run, layers, sparse = self._run, len(self._layers), len(self._sparse)
        run.meter.count("step.compiled")
        if self._attends:  # else the engine counts
            slow, fast = len(run.batch_pass.slow), len(run.batch_pass.fast)
            run.meter.count("numba.dense_attention", slow * layers + fast * (layers - sparse))
            run.meter.count("numba.sparse_attention", fast * sparse)
            run.meter.count("numba.code_scan", fast * sparse * run.policy.coded)

    def _make_room(self, X: int, most: int) -> None:
        # buffers for X tokens, `most` of a request; kept from step to step
        run, step = self._run, self._step_X
        B, longest = run.store.batch, run.batch_pass.longest
        step[[Step.TOKENS, Step.REQUESTS, Step.QUERIES, Step.LONGEST]] = X, B, most, longest
        pages = run.store.pages(self._layers[0]).key_PHND
        step[Step.PAGE], step[Step.TABLE] = pages.shape[2], run.store.block_table_BP.shape[1]
        step[Step.KIND] = KINDS[pages.dtype]
        if (X, most, int(step[Step.BUDGET])) == self._room:
            return
        self._room = X, most, int(step[Step.BUDGET])
        sizes = (Step.HIDDEN, Step.HEADS, Step.GROUP, Step.WIDTH, Step.INNER)
        hidden, H, G, D, M = (int(step[size]) for size in sizes)
        items, K = B * H * 2 * self._threads, int(step[Step.BUDGET]) if run.policy.coded else 0
        L, audited = len(self._layer_LX), run.audit is not None
        shapes: dict[str, tuple[Any, tuple[int, ...], torch.dtype]] = {
            "sync": (Step.SYNC, (TICKETS + L * STAGES + 1,), torch.int64),
            "made": (Step.MADE_XO, (X, (H * G + 2 * H) * D), torch.float32),
            "out": (Step.OUT_XO, (X, H * G * D), torch.float32),
            "back": (Step.BACK_XI, (X, hidden), torch.float32),
            "gate": (Step.GATE_XM, (X, M), torch.float32),
            "up": (Step.UP_XM, (X, M), torch.float32),
            "round": (Step.ROUND_XM, (X, M), torch.int16),
            "scale": (Step.SCALE_XB, (X, M // BLOCK), torch.float32),
            "total": (Step.TOTAL_XB, (X, M // BLOCK), torch.float32),
            "part": (Step.PART_IQD, (items * most * G, D), torch.float32),
            "most": (Step.MOST_IQ, (items * most * G,), torch.float32),
            "sum": (Step.SUM_IQ, (items * most * G,), torch.float32),
            "last": (Step.LAST_BHGD, (B, H, G, D), torch.float32),
            "logit": (Step.LOGIT_BHG, (B, H, G), torch.float32),
            "mean": (Step.MEAN_BHE, (B, H, D), torch.float32),
            "logits": (Step.LOGITS_XV, (X, int(step[Step.HEAD + OUT])), torch.float32),
            "choice": (None, (L, B, H, K), torch.int32),
            "unread": (None, (L, B, H, 2), torch.float32),
            "queries": (None, (L, B, H, G, D) if audited else (0,), torch.float32),
        }
        for name, (word, shape, dtype) in shapes.items():
            if name not in self._buffers or self._buffers[name].shape != shape:
                self._buffers[name] = torch.zeros(shape, dtype=dtype)
                if word is not None:
                    step[word] = self._buffers[name].data_ptr()
        for name, word in (("choice", Word.CHOICE), ("unread", Word.UNREAD), *[("queries", Word.QUERIES)] * audited):
            self._layer_LX[:, word] = [part.data_ptr() for part in self._buffers[name]]

    def _call(self, first: int, last: int) -> None:
        from sfi_kernels.loops import views  # noqa: PLC0415 - brings numba
        from sfi_kernels.loops.step import run_stages  # noqa: PLC0415
        from sfi_kernels.loops.step_heads import choose  # noqa: PLC0415

        step = self._step_X
        if not step[Step.PRODUCT]:
            step[Step.PRODUCT] = views.product.address
            step[Step.READ] = views.READERS[step[Step.KIND]].address
        if step[Step.CHOOSES] and not step[Step.CHOOSE]:
            step[Step.CHOOSE] = choose.address
        self._buffers["sync"].zero_()
        arguments = self._threads, first, last, self._step_X, self._layer_LX, self._real_X
        with _turn:
            others = [pool().submit(run_stages, share, *arguments) for share in range(1, self._threads)]
            try:
                run_stages(0, *arguments)
            finally:
                wait(others)
        for other in others:
            other.result()
