"""What a forward pass hands to its layers: the step descriptor, and the rows whose memory is refreshed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from sfi_core.kv_cache import KVCache
from sfi_core.policies.base import Policy
from sfi_core.position_sets import allowed_positions
from sfi_core.sparse_state import SparseState
from sfi_kernels.decode_attention import slots
from sfi_kernels.split_plan import split_plan, work_items
from sfi_kernels.step_descriptor import (
    FAST,
    IDLE,
    SLOW,
    StepDescriptor,
    StepRequest,
    describe_step,
    sent,
)


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward pass under way.

    Attributes:
        decode: Whether it decodes one token a request, instead of reading the prompt.
        final: Whether it reads the last piece of the prompt, step 0.
        start: Cached tokens of each request before it.
        count: New tokens of each request; 0 leaves a request out.
    """

    decode: bool
    final: bool
    start: list[int]
    count: list[int]

    @property
    def length(self) -> list[int]:
        """Cached tokens of each request after it."""
        return [start + count for start, count in zip(self.start, self.count, strict=True)]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some requests of the batch whose selected memory is refreshed, on the cache's device.

    Attributes:
        requests: Which.
        request_R: The same, int32.
        sink_R: Their sink tokens, int32.
        length_R: Their cached tokens, int32.
        table_RP: Their page numbers, int32.
        allowed_RT: Their candidate sets J.
        longest: The most cached tokens, T.
        most_sink: The most sink tokens.
    """

    requests: tuple[int, ...]
    request_R: torch.Tensor
    sink_R: torch.Tensor
    length_R: torch.Tensor
    table_RP: torch.Tensor
    allowed_RT: torch.Tensor
    longest: int
    most_sink: int

    @classmethod
    def of(
        cls,
        requests: tuple[int, ...],
        states: Sequence[SparseState],
        sink: int,
        step: StepDescriptor,
        table_BP: torch.Tensor,
    ) -> Self:
        """Gather the rows of some requests; those of the slow ones lie in the descriptor already."""
        chosen = [states[row] for row in requests]
        sinks = [state.sink(sink) for state in chosen]
        longest = max(state.length for state in chosen)
        if requests == step.slow:
            request_R, sink_R, length_R, start_R = step.slow_R
        else:
            lengths, starts = zip(*((s.length, s.recent_start) for s in chosen), strict=True)
            lists = torch.tensor([requests, sinks, lengths, starts], dtype=torch.int32)
            request_R, sink_R, length_R, start_R = sent(lists, table_BP.device)
        return cls(
            requests=requests,
            request_R=request_R,
            sink_R=sink_R,
            length_R=length_R,
            table_RP=table_BP[request_R.long()],
            allowed_RT=allowed_positions(longest, sink_R, start_R),
            longest=longest,
            most_sink=max(sinks),
        )


def describe_pass(
    forward: Forward,
    states: Sequence[SparseState],
    policy: Policy,
    cache: KVCache,
    device: torch.device,
) -> tuple[StepDescriptor, StepDescriptor | None]:
    """Write the pass's descriptor, and one for the layers left dense, if any.

    On the triton backend a decoding step is planned as well.
    """
    heads = next((pages.key_PHND.shape[1] for pages in cache.layers.values()), 1)
    plans = forward.decode and cache.backend == "triton"
    room = work_items(cache.batch, heads, slots(device)) if plans else 0

    def describe(*, dense: bool) -> StepDescriptor:
        requests = [
            _request(forward.decode and not dense, count, state, policy)
            for count, state in zip(forward.count, states, strict=True)
        ]
        descriptor = describe_step(requests, room, device)
        if plans:
            split_plan.triton(descriptor, heads, slots(device))
        return descriptor

    return describe(dense=False), describe(dense=True) if policy.config.dense_layers else None


def _request(may_be_fast: bool, count: int, state: SparseState, policy: Policy) -> StepRequest:
    sink, packed = state.sink(policy.config.sink), state.packed_tokens
    if policy.selects_before:  # this step's selection may be larger than the last one's
        packed = sink + min(policy.config.budget, max(0, state.recent_start - sink))
    mode = FAST if may_be_fast and not state.slow else SLOW
    return StepRequest(
        mode=mode if count else IDLE,
        length=state.length,
        recent_start=state.recent_start,
        packed=packed,
        sink=sink,
        count=count,
    )
