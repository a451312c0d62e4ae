"""The forward pass under way: what each request does in it, what all layers share, and who watches the layers."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

import torch

from sfi_core.engine.ledger import RequestPass
from sfi_core.policies.base import Policy
from sfi_core.state.kv_store import KVStore
from sfi_core.state.request import RequestState
from sfi_kernels.decode_attention import resident_programs, split_plan, work_items
from sfi_kernels.step_descriptor import FAST, MODE, PROMPT, SLOW, StepDescriptor, StepRequest, describe_step, sent


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests of the batch whose selected memory is refreshed; tensors are int32.

    `requests` are their rows in the batch, empty if only the device knows them; `request_R` the same, -1 for padding.
    `allowed_RT` are the candidate sets J, bool. `longest`, T, and `most_sink` bound the cached and the sink tokens.
    """

    requests: tuple[int, ...]
    request_R: torch.Tensor
    sink_R: torch.Tensor
    length_R: torch.Tensor
    table_RP: torch.Tensor
    allowed_RT: torch.Tensor
    longest: int
    most_sink: int
    _head_pages: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def head_pages(self, heads: int, page_size: int) -> torch.Tensor:
        """Return the pages of each of `heads` KV heads, as `KVStore.norms` takes them; call on one stream only."""
        if heads not in self._head_pages:
            head_H1 = torch.arange(heads, dtype=torch.int32, device=self.table_RP.device)[:, None]
            used_RP = self.table_RP[:, : -(-self.longest // page_size)]
            self._head_pages[heads] = used_RP[:, None] * heads + head_H1
        return self._head_pages[heads]

    @classmethod
    def of(cls, states: dict[int, RequestState], sink: int, step: StepDescriptor, table_BP: torch.Tensor) -> Self:
        """Make the rows of some requests, by row; the descriptor already holds those of all slow ones."""
        requests = tuple(states)
        numbers = [(state.sink(sink), state.length, state.recent_start) for state in states.values()]
        sinks, lengths, starts = zip(*numbers, strict=True)
        request_R, sink_R, length_R, start_R = step.slow_R
        if requests != step.slow:
            lists = torch.tensor([requests, sinks, lengths, starts], dtype=torch.int32)
            request_R, sink_R, length_R, start_R = sent(lists, table_BP.device)
        table_RP, allowed_RT = table_BP[request_R.long()], allowed_positions(max(lengths), sink_R, start_R)
        return cls(requests, request_R, sink_R, length_R, table_RP, allowed_RT, max(lengths), max(sinks))

    @classmethod
    def of_slow(cls, sink: int, step: StepDescriptor, table_BP: torch.Tensor) -> Self:
        """Make the rows of the descriptor's slow requests without host data, for a CUDA graph."""
        request_R, sink_R, length_R, start_R = step.slow_R
        table_RP = table_BP[request_R.clamp_min(0).long()]
        allowed_RT = allowed_positions(step.longest, sink_R, start_R)
        return cls((), request_R, sink_R, length_R, table_RP, allowed_RT, step.longest, sink)

    @classmethod
    def of_all(cls, sink: int, step: StepDescriptor, table_BP: torch.Tensor, longest: int) -> Self:
        """Make the rows of all requests likewise; J is empty in idle ones."""
        sink_B, start_B = step.sink_B.contiguous(), step.recent_start_B.contiguous()
        request_B = torch.arange(step.batch, dtype=torch.int32, device=table_BP.device)
        allowed_BT = allowed_positions(longest, sink_B, start_B)
        return cls((), request_B, sink_B, step.length_B, table_BP, allowed_BT, longest, sink)

    @classmethod
    def of_fast(cls, sink: int, step: StepDescriptor, table_BP: torch.Tensor) -> Self:
        """Make the rows of all requests for a choice, likewise; those of requests that are not fast are -1."""
        rows = cls.of_all(sink, step, table_BP, 0)
        return replace(rows, request_R=torch.where(step.table_BX[:, MODE] == FAST, rows.request_R, -1))


def allowed_positions(longest: int, sink_B: torch.Tensor, recent_start_B: torch.Tensor) -> torch.Tensor:
    """Return the candidate sets J: all but the sink and recent tokens (Eq. 2): [B, T] bool, T of the longest."""
    position = torch.arange(longest, device=sink_B.device)
    return (position >= sink_B[:, None]) & (position < recent_start_B[:, None])


class BatchPass:
    """One forward pass; made new for each pass and then only read.

    `start` and `count` are each request's cached tokens before the pass and its new ones, `longest` the most cached
    tokens after it. The rows that read a piece of their prompt are `prompts`. All prompts end together, as `ended`:
    they are padded on the left, so that a row that has begun has a token in every column. Rows that decode, in other
    passes, are `slow` (g_t = 1) or `fast`. `dense` has all of them slow, for `dense_layers`; None without those.
    `chosen` has the `Rows` made so far, which all layers share.
    """

    def __init__(
        self, passes: Sequence[RequestPass], start: Sequence[int], step: StepDescriptor, dense: StepDescriptor | None
    ) -> None:
        self.passes, self.start = tuple(passes), tuple(start)
        self.descriptor, self.dense = step, dense
        self.count = tuple(request.count for request in passes)
        self.longest = max(map(sum, zip(start, self.count, strict=True)))
        self.prompts, self.slow, self.fast = (
            tuple(row for row, request in enumerate(passes) if request.kind == kind) for kind in (PROMPT, SLOW, FAST)
        )
        self.ended = tuple(row for row, request in enumerate(passes) if request.ends_prompt)
        self.decodes = bool(self.slow or self.fast)
        assert not (self.prompts and self.decodes), "prompts are read in passes of their own"
        assert self.ended in ((), self.prompts), "prompts end together"
        self.chosen: dict[tuple[int, ...], Rows] = {}

    def descriptor_of(self, *, left_dense: bool) -> StepDescriptor:
        """Return a layer's descriptor, by whether it is one of `dense_layers`."""
        step = self.dense if left_dense else self.descriptor
        assert step is not None, "the pass has been described"
        return step

    @property
    def generates(self) -> bool:
        """Whether any request has a next token after the pass."""
        return self.decodes or bool(self.ended)


class Requests(NamedTuple):
    """The requests of a pass as a descriptor lists them; `dense` has them all slow, for `dense_layers`."""

    requests: list[StepRequest]
    dense: list[StepRequest] | None


@dataclass(slots=True)
class Descriptors:
    """Writes each pass's descriptors to new buffers and plans triton's work; `launched` if the device has begun it.

    `windows` has what the pass does in rings, by their kind, as `engine.windows` describes it. `chosen` are the
    requests that a policy chooses for in a recorded step, where their rows are packed.
    """

    store: KVStore
    device: torch.device
    launched: bool = False
    windows: dict[Hashable, Any] = field(default_factory=dict)
    chosen: Rows | None = None

    def describe(self, known: Requests) -> tuple[StepDescriptor, StepDescriptor | None]:
        """Return a pass's descriptor, and the one for `dense_layers`, if there are any."""
        self.windows.clear()
        dense = None if known.dense is None else self._describe(known.dense)
        return self._describe(known.requests), dense

    def _describe(self, requests: Sequence[StepRequest]) -> StepDescriptor:
        decodes = any(request.mode in (FAST, SLOW) for request in requests)
        if not decodes or self.store.backend != "triton":
            return describe_step(requests, 0, self.device)
        descriptor = describe_step(requests, self._work_room(), self.device)
        self._plan(descriptor)
        return descriptor

    def _work_room(self) -> int:
        # the most work items that a step can have
        return work_items(self.store.batch, self.store.heads, resident_programs(self.device))

    def _plan(self, step: StepDescriptor) -> None:
        split_plan.triton(step, self.store.heads, resident_programs(self.device))


def known_requests(passes: Sequence[RequestPass], states: Sequence[RequestState], policy: Policy) -> Requests:
    """List the requests of a pass for its descriptors."""
    pairs = list(zip(passes, states, strict=True))
    requests = [_step_request(*pair, policy, dense=False) for pair in pairs]
    if not policy.config.dense_layers:
        return Requests(requests, None)
    return Requests(requests, [_step_request(*pair, policy, dense=True) for pair in pairs])


def _step_request(request: RequestPass, state: RequestState, policy: Policy, *, dense: bool) -> StepRequest:
    sink, packed = state.sink(policy.config.sink), state.packed_tokens
    if policy.chooses:  # the step's own selection may be larger than the last one
        packed = sink + min(policy.config.budget, max(0, state.recent_start - sink))
    mixed = policy.mixes_heads and not dense
    return StepRequest(
        mode=SLOW if dense and request.kind == FAST else request.kind, length=state.length,
        recent_start=state.recent_start, packed=packed, sink=sink, count=request.count, mixed=mixed,
        sparse_start=state.read_start if mixed else None,
    )  # fmt: skip


class SeenLayer(Protocol):
    """An `engine.layer.Layer`, as far as a run knows it."""

    index: int
    options: dict[str, Any]
    batch_pass: BatchPass


class Watcher(Protocol):
    """Sees the queries and outputs of every layer, and may keep data of its own."""

    def see(self, layer: SeenLayer, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Look at the pass's queries and outputs of a layer."""

    def forget(self, request: int) -> None:
        """Drop the data of a request that has left; by default there are none by request."""
        del request


@dataclass(frozen=True, slots=True)
class PromptLayer:
    """The input of a layer's first selection: the prompt's last queries, and scale, soft cap and sinks."""

    options: dict[str, Any]
    query_BHGTD: torch.Tensor


@dataclass(slots=True)
class PromptQueries(Watcher):
    """Keeps the last `window` queries of each prompt, by layer, for the first selection; None keeps all."""

    window: int | None
    layers: dict[int, PromptLayer] = field(default_factory=dict)

    def see(self, layer: SeenLayer, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Keep the queries of a piece of the prompt."""
        self.layers[layer.index] = PromptLayer(layer.options, self.with_kept(layer, query_BHGTD).clone())

    def with_kept(self, layer: SeenLayer, query_BHGTD: torch.Tensor) -> torch.Tensor:
        """Return the prompts' last queries, those of the new piece included, padded on the left."""
        before = self.layers.get(layer.index)
        query = query_BHGTD if before is None else torch.cat([before.query_BHGTD, query_BHGTD], 3)
        return query if self.window is None else query[:, :, :, -self.window :]
