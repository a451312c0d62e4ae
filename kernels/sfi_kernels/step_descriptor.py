"""The step descriptor (Sec. 4.2): the numbers that every layer of a pass reads, in one int32 buffer.

    lists  [7, ...B]   of the requests: length, start and count of the new tokens; then of the slow requests, in
                       order: row, sink tokens, length and first recent token
    table  [B, WORDS]  a row for each request, its words named below
    work   [X, 4]      work items of the split attention: request, first unit, units, unused;
                       request -1 for no item

Lists, table and work begin at multiples of 16 bytes, so that a kernel is compiled once for all batch sizes.

A decoding request reads its packed segment, that of its SLOT, then its pages from START on; a slow one has no packed
tokens and starts at 0. A unit is 64 tokens of either. A request that reads its prompt has no work here. Some heads of a
mixed request read everything, which START and PACKED describe; its sparse heads read packed rows, then the pages from
MIXED's position on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

IDLE, PROMPT, FAST, SLOW = range(4)  # the first two have no work in the decoding kernel
UNIT = 64
LISTS = 7
WORDS = 16
ALIGNED = 4  # int32 numbers of 16 bytes
(
    MODE,  # IDLE, PROMPT, FAST or SLOW
    LENGTH,  # cached tokens, the queries' own included
    START,  # first token read from the pages
    PACKED,  # tokens read from the packed segment
    SINK,  # sink tokens
    ALLOWED_START,  # the candidate set J, from ...
    ALLOWED_STOP,  # ... up to here, where the recent segment begins
    EVIDENCE,  # place in the slow list; -1 for a request that is not there
    FIRST,  # first work item
    SPLITS,  # work items
    MIXED,  # 0, or where heads may differ: 1 + the first token of the pages that a sparse head reads
    QUERIES,  # queries of a request that decodes, the last ones of the pass; 0 for another request
    SLOT,  # row of the packed segments and of what policies keep, which may have other rows than the batch; -1 for none
) = range(13)


class NewRows(NamedTuple):
    """A layer's new keys and values, a request's the last of T, and the pages beside those of the keys."""

    key_BHTD: torch.Tensor
    value_BHTE: torch.Tensor
    value_PHNE: torch.Tensor
    norm_PHN: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepDescriptor:
    """One pass over the batch, in an int32 `buffer`.

    `slow`, whose evidence is wanted, `fast` and `mixed` are rows of requests, in order; `mixed` is None where only the
    device knows, as in a CUDA graph. `longest` are the cached tokens of the longest slow request, or a bound, 0 without
    one; `padding` the rows of -1 behind the slow requests' lists; `queries` the most of a decoding request. `new` are
    rows of a layer that `code_scan` or `code_tokens` appends to the pages, None where they are there.
    """

    buffer: torch.Tensor
    batch: int
    slow: tuple[int, ...]
    fast: tuple[int, ...]
    longest: int
    padding: int = 0
    mixed: tuple[int, ...] | None = ()
    queries: int = 1
    new: NewRows | None = None

    @property
    def slow_rows(self) -> int:
        """Rows of the slow requests' lists, padding included."""
        return len(self.slow) + self.padding

    @property
    def length_B(self) -> torch.Tensor:
        """Cached tokens, the new ones included."""
        return self._list(0, self.batch)

    @property
    def append_start_B(self) -> torch.Tensor:
        """Position of the first new token."""
        return self._list(1, self.batch)

    @property
    def append_count_B(self) -> torch.Tensor:
        """New tokens."""
        return self._list(2, self.batch)

    @property
    def sink_B(self) -> torch.Tensor:
        """Sink tokens."""
        return self.table_BX[:, SINK]

    @property
    def recent_start_B(self) -> torch.Tensor:
        """First position of the recent segment."""
        return self.table_BX[:, ALLOWED_STOP]

    @property
    def slow_R(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, sink tokens, lengths and first recent tokens of the slow requests and the padding."""
        which, sink, length, start = (self._list(place, self.slow_rows) for place in range(3, LISTS))
        return which, sink, length, start

    def _list(self, place: int, size: int) -> torch.Tensor:
        begin = place * list_room(self.batch)
        return self.buffer[begin : begin + size]

    @property
    def table_BX(self) -> torch.Tensor:
        """The requests' words, [B, WORDS]."""
        begin = LISTS * list_room(self.batch)
        return self.buffer[begin : begin + self.batch * WORDS].view(self.batch, WORDS)

    @property
    def work_XI(self) -> torch.Tensor:
        """The work items, [X, 4]."""
        begin = LISTS * list_room(self.batch) + WORDS * self.batch
        return self.buffer[begin:].view(-1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """One request of a pass, in plain numbers.

    `length` are the cached tokens, of which `count` are new: a decoding request's queries. `packed` are at least as
    many tokens as any KV head has packed. The sparse heads of a `mixed` request read pages from `sparse_start` on, None
    for `recent_start`: on a slow step their packed segment is still the last one, while J has grown. Its rows are in
    `slot`, None for the request's row in the batch, -1 for none. Of a slow request the evidence is `wanted` or not.
    """

    mode: int
    length: int
    recent_start: int
    packed: int
    sink: int
    count: int = 1
    mixed: bool = False
    sparse_start: int | None = None
    slot: int | None = None
    wanted: bool = True

    @property
    def decodes(self) -> bool:
        """Whether the decoding kernel attends for the request."""
        return self.mode in (FAST, SLOW)


def describe_step(
    requests: Sequence[StepRequest], work_items: int, device: torch.device, into: torch.Tensor | None = None
) -> StepDescriptor:
    """Write a descriptor on the host and send it in one copy; `split_plan` fills in the work.

    `into` is the buffer of an earlier descriptor of as many requests and `work_items`; None makes one. Raise
    `ValueError` for a decoding request without a query, or with more than its kind may have.
    """
    slow = tuple(row for row, request in enumerate(requests) if request.mode == SLOW and request.wanted)
    slow_requests = [requests[row] for row in slow]
    lists = [
        [request.length for request in requests],
        [request.length - request.count for request in requests],
        [request.count for request in requests],
        slow,
        [request.sink for request in slow_requests],
        [request.length for request in slow_requests],
        [request.recent_start for request in slow_requests],
    ]
    room = list_room(len(requests))
    numbers = [number for part in lists for number in [*part, *[-1] * (room - len(part))]]
    for row, request in enumerate(requests):
        numbers += _words(request, row, slow.index(row) if row in slow else -1)
    buffer = torch.tensor(numbers + [-1] * (4 * work_items), dtype=torch.int32)
    longest = max((request.length for request in slow_requests), default=0)
    fast = tuple(row for row, request in enumerate(requests) if request.mode == FAST)
    mixed = tuple(row for row, request in enumerate(requests) if request.mixed and request.decodes)
    queries = max((request.count for request in requests if request.decodes), default=1)
    return StepDescriptor(sent(buffer, device, into), len(requests), slow, fast, longest, mixed=mixed, queries=queries)


def fast_step(start_B: torch.Tensor, length_B: torch.Tensor, work_items: int, packed: int = 0) -> StepDescriptor:
    """Describe fast requests with a query each, from int32 numbers on their device; `split_plan` fills in the work.

    Each reads its pages from `start_B` up to `length_B`, and at most `packed` rows of its packed segment.
    """
    B = len(length_B)
    step = StepDescriptor(length_B.new_zeros(LISTS * list_room(B) + WORDS * B + 4 * work_items), B, (), (), 0)
    table = step.table_BX
    for word, number in ((MODE, FAST), (PACKED, packed), (QUERIES, 1)):
        table[:, word].fill_(number)
    table[:, LENGTH], table[:, START] = length_B, start_B
    table[:, SLOT] = torch.arange(B, device=length_B.device)
    return step


def _words(request: StepRequest, row: int, evidence: int) -> list[int]:
    most = request.length if request.mode == SLOW and not request.mixed else 1
    if request.decodes and not 1 <= request.count <= most:
        rule = "at most its length in a slow request, and 1 in a fast or mixed one"
        raise ValueError(f"count must be {rule}, got {request.count} of {request.length} cached tokens")
    words = [0] * WORDS
    words[MODE], words[LENGTH], words[SINK] = request.mode, request.length, request.sink
    words[ALLOWED_START], words[ALLOWED_STOP] = request.sink, request.recent_start
    words[EVIDENCE], words[QUERIES] = evidence, request.count if request.decodes else 0
    words[SLOT] = row if request.slot is None else request.slot
    if request.mixed and request.decodes:
        words[MIXED] = 1 + (request.recent_start if request.sparse_start is None else request.sparse_start)
    elif request.mode != SLOW:
        words[START], words[PACKED] = request.recent_start, request.packed
    return words


def list_room(batch: int) -> int:
    """Return the size of each list: the batch, rounded up to 16 bytes."""
    return -(-batch // ALIGNED) * ALIGNED


def sent(tensor: torch.Tensor, device: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
    """Send a host tensor to a device, or into a tensor there, without waiting for the copy."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True) if into is None else into.copy_(tensor, True)
