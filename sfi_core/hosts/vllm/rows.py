"""The decoding rows of vLLM's batch as the rows of one launch, in buffers at fixed addresses, as CUDA graphs need them.

A row finds its packed memory by the descriptor's SLOT, its blocks in vLLM's own table. One without a slot reads
everything. The launch always has room for the evidence of `EVIDENCE` rows, more than a step asks for; once the model
has run, outside the graph, all layers select from it together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sfi_core.engine import select
from sfi_core.engine.batch_pass import Descriptors, Requests
from sfi_core.engine.layer import Layer
from sfi_core.engine.run import Run
from sfi_core.policies.base import EvidencePolicy, Policy
from sfi_kernels.decode_attention import decode_attention, resident_programs, split_plan, work_items
from sfi_kernels.step_descriptor import IDLE, SLOW, StepDescriptor, StepRequest, describe_step

EVIDENCE = 2  # rows that select anew after a step; others wait for the next one
PADDING = StepRequest(mode=IDLE, length=0, recent_start=0, packed=0, sink=0, count=0, slot=0)


def shares_launch(backend: str, policy: Policy, *, audits: bool) -> bool:
    """Say whether the decoding rows are those of one launch: a policy selects from its evidence, or nothing."""
    plain = not policy.selects_after or isinstance(policy, EvidencePolicy)
    return backend == "triton" and plain and not (policy.chooses or audits)


def evidence_numbers(query_heads: int, longest: int) -> int:
    """Return the float32 numbers of a layer's evidence: logits, and their log-sum-exp."""
    return EVIDENCE * query_heads * (longest + 1)


@dataclass(slots=True)
class KnownOnly(Descriptors):
    """Keeps what the host knows of a pass by slot, for a launch whose rows are others; describes nothing itself."""

    known: list[StepRequest] = field(default_factory=list)

    def describe(self, known: Requests) -> tuple[StepDescriptor, StepDescriptor | None]:
        """See `Descriptors`."""
        self.known = known.requests
        nothing = torch.empty(0, dtype=torch.int32, device=self.device)
        step = StepDescriptor(nothing, self.store.batch, (), (), 0)
        return step, step


class RowLaunch:
    """Attends with the decoding rows of a pass, and selects from their evidence.

    A batch of decoding rows alone, which a graph may hold, has descriptors of its own for each number of rows: one for
    the layers, one for `dense_layers` if there are any. `evidence` has a flat float32 buffer of each layer that
    selects.
    """

    def __init__(self, run: Run, evidence: dict[int, torch.Tensor]) -> None:
        """Launch for a run whose rows are slots."""
        self.run, self.evidence = run, evidence
        self.known = run.descriptors = KnownOnly(run.store, run.device)
        self._alone: dict[int, list[StepDescriptor]] = {}
        self._mixed: list[StepDescriptor] = []
        self._heads: dict[int, tuple[int, int]] = {}  # KV heads, and queries of each

    def prepare(self, rows: int) -> None:
        """Allocate the descriptors of a batch of decoding rows alone, idle, before a graph may be recorded."""
        if rows not in self._alone:
            count = 1 + bool(self.run.policy.config.dense_layers)
            self._alone[rows] = [self._described([PADDING] * rows) for _ in range(count)]

    def describe(self, requests: Sequence[StepRequest], *, alone: bool) -> None:
        """Describe the rows of the pass that begins, padding included."""
        kinds = [requests]
        if self.run.policy.config.dense_layers:
            kinds.append([replace(one, mode=SLOW, wanted=False) if one.decodes else one for one in requests])
        if alone:
            self.prepare(len(requests))
            known = self._alone[len(requests)]
            self._alone[len(requests)] = [self._described(*pair) for pair in zip(kinds, known, strict=True)]
        elif requests:
            self._mixed = [self._described(kind) for kind in kinds]

    def _described(self, requests: Sequence[StepRequest], known: StepDescriptor | None = None) -> StepDescriptor:
        heads, programs = self.run.store.heads, resident_programs(self.run.device)
        items, into = work_items(len(requests), heads, programs), None if known is None else known.buffer
        step = describe_step(requests, items, self.run.device, into)
        split_plan.triton(step, heads, programs)
        return replace(step, longest=self.run.store.capacity, padding=EVIDENCE - len(step.slow))

    def attend(
        self, index: int, query_RHGD: torch.Tensor, out_RHGE: torch.Tensor, table_RP: torch.Tensor, *, alone: bool,
        **options: Any,
    ) -> None:  # fmt: skip
        """Attend with the rows that were described last, in place of `out_RHGE`; `options` are those of `Layer`."""
        run, R = self.run, len(query_RHGD)
        steps = self._alone[R] if alone else self._mixed
        step = steps[-1 if index in run.policy.config.dense_layers else 0]
        # a dense layer reads no packed rows, and has none
        segment = run.segments.get(index) or next(iter(run.segments.values()))
        pages, into = run.store.pages(index), self.evidence.get(index)
        _, H, G, _ = query_RHGD.shape
        self._heads[index], run.options[index] = (H, G), options
        decode_attention.triton(
            query_RHGD.unsqueeze(3), segment.key_BHSD, segment.value_BHSE, segment.length_BH, pages.key_PHND,
            pages.value_PHNE, table_RP[:R], step, **options, evidence=into is not None, into=into,
            out=out_RHGE.unsqueeze(3),
        )  # fmt: skip

    def refresh(self, slots: dict[int, int]) -> None:
        """Select anew for slow requests, given the place of their evidence by slot, in all layers that select."""
        rows, longest = tuple(slots), max(self.run.requests[slot].length for slot in slots)
        for index in sorted(self.evidence):
            logits, sums = self._parts(index, [*slots.values()], longest)
            handed = select.Handed(Layer(self.run, index, **self.run.options[index]), logits, sums)
            select.hand_over(handed.layer, rows, self._no_query(index, len(rows)), handed)

    def end_prompt(self, run: Run, place: int | None) -> None:
        """Make the first selection of a request whose prompt ended with a single token, in a `run` of its own.

        Without a place in the evidence it keeps its sinks until a slow step selects.
        """
        for index in sorted(run.segments):
            layer = Layer(run, index, **self.run.options[index])
            query = self._no_query(index, 1)
            if place is None or index not in self.evidence:
                select.put((layer,), (0,), select.nothing(query))
                continue
            length = run.requests[0].length
            window = min(run.policy.config.window_prefill, length)
            query = run.prompt_queries.with_kept(layer, query)[:, :, :, -window:]
            logits = layer.logits((0,), query)
            logits[:, :, :, -1:], _ = self._parts(index, [place], length)  # nobody has kept the last query
            select.refresh((layer,), (0,), query, (partial(torch.clone, logits), None))

    def _parts(self, index: int, places: Sequence[int], longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        # the evidence in some places: logits [R, H, G, 1, longest], and their sums
        shape = EVIDENCE, *self._heads[index], 1, self.run.store.capacity
        numbers, rows = math.prod(shape), [slice(place, place + 1) for place in places]
        logits = self.evidence[index][:numbers].view(shape)
        sums = self.evidence[index][numbers:][: math.prod(shape[:4])].view(shape[:4])
        return torch.cat([logits[row, ..., :longest] for row in rows]), torch.cat([sums[row] for row in rows])

    def _no_query(self, index: int, rows: int) -> torch.Tensor:
        key_PHND = self.run.store.pages(index).key_PHND
        return key_PHND.new_zeros(rows, *self._heads[index], 1, key_PHND.shape[3])
