"""The decoding rows of a server's batch as those of one call a layer, in buffers at fixed addresses, as graphs need.

A row finds what is kept of it by the descriptor's SLOT, its blocks in the server's own table. One without a slot reads
everything. In a graph there is room for the evidence of `EVIDENCE` rows, more than a step asks for; once the model has
run, outside the graph, all layers select from it together. On a CPU a layer selects at once, for any number of rows.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from sfi_core.engine import select
from sfi_core.engine.attend import end_prompts
from sfi_core.engine.batch_pass import Descriptors
from sfi_core.engine.layer import Layer
from sfi_core.engine.ledger import RequestPass
from sfi_core.engine.run import Run
from sfi_core.hosts.serving.plan import NO_SLOT
from sfi_core.observers.events import SelectionEvent
from sfi_core.policies.base import Selection
from sfi_kernels.compiled import fastest
from sfi_kernels.decode_attention import decode_attention, resident_programs, split_plan, work_items
from sfi_kernels.step_descriptor import IDLE, SLOW, StepDescriptor, StepRequest, describe_step, sent

EVIDENCE = 2  # rows that select anew after a step; others wait for the next one
PADDING = StepRequest(mode=IDLE, length=0, recent_start=0, packed=0, sink=0, count=0, slot=NO_SLOT)


def evidence_numbers(query_heads: int, longest: int) -> int:
    """Return the float32 numbers of a layer's evidence: logits, and their log-sum-exp."""
    return EVIDENCE * query_heads * (longest + 1)


class SlotDescriptors(Descriptors):
    """Describes a pass by slot, for selections, without work items: attention has other rows."""

    def _describe(self, requests: Sequence[StepRequest]) -> StepDescriptor:
        return describe_step(requests, 0, self.device)


class Described(NamedTuple):
    """The rows of a pass: a descriptor for the layers, and for `dense_layers`; and each row's slot.

    `slot_R`, int64, has for a row without one the number behind all. `longest` bounds the rows' tokens.
    """

    steps: tuple[StepDescriptor, StepDescriptor]
    slots: tuple[int, ...]
    slot_R: torch.Tensor
    longest: int


class RowLaunch:
    """Attends with the decoding rows of a pass, and selects from their evidence.

    Each number of rows has descriptors of its own, at addresses that a graph of as many rows knows. `evidence` has a
    flat float32 buffer of each layer that selects in a graph. By layer, `queries` are the last of each slot,
    [slots + 1, H, G, D], and `outs` the outputs, if somebody watches: the last place is that of all other rows.
    """

    def __init__(self, run: Run, evidence: dict[int, torch.Tensor]) -> None:
        """Launch for a run whose rows are slots, and whose layers and groups of heads are known."""
        self.run, self.evidence, self.on_gpu = run, evidence, run.store.backend == "triton"
        run.descriptors = SlotDescriptors(run.store, run.device)
        run.describe([RequestPass()] * run.store.batch, [0] * run.store.batch)  # a graph is recorded before any pass
        self._described: dict[int, Described] = {}
        self._now: Described  # the rows of the pass under way
        self.queries: dict[int, torch.Tensor] = {}
        self.outs: dict[int, torch.Tensor] = {}
        for index in sorted(run.layers):
            key, value, _ = run.store.pages(index).tensors
            places = run.store.batch + 1, key.shape[1], run.groups[index]
            self.queries[index] = key.new_zeros(*places, key.shape[3])
            if run.watchers:
                self.outs[index] = value.new_zeros(*places, value.shape[3])
        self._diagnostics: dict[int, dict[str, torch.Tensor]] = {}

    def rest(self, rows: int) -> None:
        """Let so many rows idle before a plan is known: a graph that is recorded, or a dummy pass, changes nothing."""
        if rows not in self._described or self.run.kept or not self.on_gpu:
            self.describe([PADDING] * rows, [NO_SLOT] * rows)
        self._now = self._described[rows]

    def describe(self, requests: Sequence[StepRequest], slots: Sequence[int]) -> None:
        """Describe the rows of the pass that begins, padding included; `slots` are those whose queries are kept."""
        known = self._described.get(len(requests))
        first = self._step(requests, known and known.steps[0].buffer)
        steps = first, first
        if self.run.policy.config.dense_layers:
            dense = [replace(row, mode=SLOW, wanted=False) if row.decodes else row for row in requests]
            steps = first, self._step(dense, known and known.steps[1].buffer)
        places = torch.tensor([self.run.store.batch if slot == NO_SLOT else slot for slot in slots])
        longest = self.run.store.capacity if self.on_gpu else max(row.length for row in requests)
        slot_R = sent(places, self.run.device, known and known.slot_R)
        self._now = self._described[len(requests)] = Described(steps, tuple(slots), slot_R, longest)

    def _step(self, requests: Sequence[StepRequest], into: torch.Tensor | None) -> StepDescriptor:
        device, heads = self.run.device, self.run.store.heads
        if not self.on_gpu:
            return describe_step(requests, 0, device, into)
        programs = resident_programs(device)
        step = describe_step(requests, work_items(len(requests), heads, programs), device, into)
        split_plan.triton(step, heads, programs)
        # a graph makes the same launches whatever the rows are
        padding, every = EVIDENCE - len(step.slow), tuple(range(len(requests)))
        return replace(step, longest=self.run.store.capacity, padding=padding, fast=every)

    def attend(
        self, index: int, query_XHGD: torch.Tensor, out_XHGE: torch.Tensor, table_RP: torch.Tensor, **options: Any
    ) -> None:
        """Attend with the rows that were described last, the batch's first; `options` are those of `Layer`."""
        run, described, layer, pseudo = self.run, self._now, Layer(self.run, index, **options), None
        query_RHGD, out_RHGE, table_RP = (x[: len(described.slots)] for x in (query_XHGD, out_XHGE, table_RP))
        step, query_RHG1D = described.steps[layer.left_dense], query_RHGD.unsqueeze(3)
        if layer.chooses:
            selections, pseudo = select.choose(layer, step, query_RHG1D, described.longest, table_RP)
            self._diagnostics[index] = {name: x for each in selections for name, x in each.diagnostics.items()}
        # a dense layer reads no packed rows, and has none
        segment = run.segments.get(index) or next(iter(run.segments.values()))
        packed, pages = (segment.key_BHSD, segment.value_BHSE), layer.pages.tensors[:2]
        by = fastest(layer.backend, run.device, *pages, *(() if layer.chooses else packed))
        result = decode_attention.on(by)(
            query_RHG1D, *packed, segment.length_BH, *pages, table_RP, step, **layer.options,
            evidence=run.policy.refreshes() and not layer.left_dense, into=self.evidence.get(index),
            out=out_RHGE.unsqueeze(3), pseudo=pseudo, position_BHS=segment.position_BHS if layer.chooses else None,
        )  # fmt: skip
        self.queries[index].index_copy_(0, described.slot_R, query_RHGD)
        if self.outs:
            self.outs[index].index_copy_(0, described.slot_R, out_RHGE)
        if self.on_gpu or result.logits_BHGWT is None:
            return
        # PyTorch's backend selects for one request after the other
        for row, logits_HG1T in zip(step.slow, result.logits_BHGWT, strict=True):
            slot = described.slots[row]
            handed = select.Handed(layer, logits_HG1T[None, ..., : run.requests[slot].length])
            select.hand_over(layer, (slot,), self._query(index, slot), handed)

    def refresh(self, slots: Sequence[int]) -> None:
        """Select anew for slow requests from the evidence that a graph has left, in the order of their rows."""
        if not (slots and self.evidence):
            return
        longest = max(self.run.requests[slot].length for slot in slots)
        for index, numbers in sorted(self.evidence.items()):
            shape = EVIDENCE, *self.queries[index].shape[1:3], 1, self.run.store.capacity
            logits, sums = numbers[: math.prod(shape)], numbers[math.prod(shape) :][: math.prod(shape[:4])]
            query = torch.cat([self._query(index, slot) for slot in slots])
            seen = logits.view(shape)[: len(slots), ..., :longest], sums.view(shape[:4])[: len(slots)]
            handed = select.Handed(Layer(self.run, index, **self.run.options[index]), *seen)
            select.hand_over(handed.layer, tuple(slots), query, handed)

    def finish(self) -> None:
        """Tell the observer what the layers have chosen, and show the watchers what they have seen."""
        run = self.run
        if run.policy.chooses and SelectionEvent in run.observer.wants and run.batch_pass.fast:
            self._tell_choices(run.batch_pass.fast)
        for index in sorted(self.outs):
            layer = Layer(run, index, **run.options[index])
            run.tell(layer, self.queries[index][:-1].unsqueeze(3), self.outs[index][:-1].unsqueeze(3))

    def _tell_choices(self, slots: Sequence[int]) -> None:
        # the segments have the chosen positions behind the sinks
        run, config = self.run, self.run.policy.config
        rows, places = [self._now.slots.index(slot) for slot in slots], {slot: at for at, slot in enumerate(slots)}
        for index, segment in sorted(run.segments.items()):
            chosen = [segment.position_BHS[slot, :, run.requests[slot].sink(config.sink) :] for slot in slots]
            index_BHK = torch.stack([pad(row, (0, config.budget), value=-1)[:, : config.budget] for row in chosen])
            diagnostics = {name: value[rows] for name, value in self._diagnostics[index].items()}
            select.note(run, (index,), places, Selection(index_BHK, diagnostics))

    def end_prompt(self, run: Run, slot: int) -> None:
        """Do for a prompt's piece of a single token, of a `run` of its own, what is done for longer ones."""
        for index in sorted(self.queries):
            query = self._query(index, slot)
            out = self.outs[index][slot : slot + 1].unsqueeze(3) if self.outs else query
            end_prompts(run, index, query, out, **self.run.options[index])

    def _query(self, index: int, slot: int) -> torch.Tensor:
        # the last query of a slot, [1, H, G, 1, D]
        return self.queries[index][slot : slot + 1].unsqueeze(3)
