"""What a forward pass hands to its layers: the step descriptor, and the rows whose memory is refreshed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from sfi_core.policies.base import Policy
from sfi_core.state.kv_cache import KVCache
from sfi_core.state.position_sets import allowed_positions
from sfi_core.state.request import SparseState
from sfi_kernels.decode_attention import resident_programs
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
        request_R: The same, int32; -1 for a row of no request.
        sink_R: Their sink tokens, int32.
        length_R: Their cached tokens, int32.
        table_RP: Their page numbers, int32.
        allowed_RT: Their candidate sets J.
        longest: The most cached tokens, T, or a bound on them.
        most_sink: The most sink tokens, or a bound on them.
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

    @classmethod
    def of_slow(cls, sink: int, step: StepDescriptor, table_BP: torch.Tensor) -> Self:
        """Gather the rows of the slow requests' lists, whoever and however many they are.

        Asks the host for nothing but bounds, so that a CUDA graph may hold it.
        """
        request_R, sink_R, length_R, start_R = step.slow_R
        return cls(
            requests=(),
            request_R=request_R,
            sink_R=sink_R,
            length_R=length_R,
            table_RP=table_BP[request_R.clamp_min(0).long()],
            allowed_RT=allowed_positions(step.longest, sink_R, start_R),
            longest=step.longest,
            most_sink=sink,
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
    plans = forward.decode and cache.backend == "triton"

    def describe(*, dense: bool) -> StepDescriptor:
        requests = step_requests(forward, states, policy, dense=dense)
        descriptor = describe_step(requests, work_room(cache, device) if plans else 0, device)
        if plans:
            plan(descriptor, cache, device)
        return descriptor

    return describe(dense=False), describe(dense=True) if policy.config.dense_layers else None


def describe_again(requests: Sequence[StepRequest], known: StepDescriptor) -> StepDescriptor:
    """Write a decoding step's descriptor over another one's buffer, for a step that fits all; not planned.

    The slow lists have room for a power of two of requests, or all, and T is `known`'s.
    """
    step = describe_step(requests, known.work_XI.shape[0], known.buffer.device, known.buffer)
    padding = bucket(len(step.slow), step.batch) - len(step.slow)
    return replace(step, longest=known.longest, padding=padding)


def bucket(slow: int, batch: int) -> int:
    """Return the least power of two that `slow` requests fit in, at most the batch."""
    return min(batch, 1 << (slow - 1).bit_length()) if slow else 0


def work_room(cache: KVCache, device: torch.device) -> int:
    """Return the most work items of a step."""
    return work_items(cache.batch, _heads(cache), resident_programs(device))


def plan(descriptor: StepDescriptor, cache: KVCache, device: torch.device) -> None:
    """Split a step's keys over the processors."""
    split_plan.triton(descriptor, _heads(cache), resident_programs(device))


def _heads(cache: KVCache) -> int:
    return next((pages.key_PHND.shape[1] for pages in cache.layers.values()), 1)


def step_requests(
    forward: Forward, states: Sequence[SparseState], policy: Policy, *, dense: bool
) -> list[StepRequest]:
    """Return what a descriptor says of the requests of a pass; `dense` makes every one slow."""
    return [
        _request(forward.decode and not dense, count, state, policy)
        for count, state in zip(forward.count, states, strict=True)
    ]


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
