"""Advancing a batch by a step in Triton: one program for the batch."""

import torch
import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.advance import state as numbers
from sfi_kernels.advance.reference import check
from sfi_kernels.advance.state import StepRules
from sfi_kernels.launch import launch
from sfi_kernels.step_descriptor import StepDescriptor

ALIGNED, LISTS, WORDS = (tl.constexpr(n) for n in (words.ALIGNED, words.LISTS, words.WORDS))
IDLE, FAST = tl.constexpr(words.IDLE), tl.constexpr(words.FAST)
MODE, LENGTH, START = (tl.constexpr(w) for w in (words.MODE, words.LENGTH, words.START))
PACKED, SINK, EVIDENCE = (tl.constexpr(w) for w in (words.PACKED, words.SINK, words.EVIDENCE))
ALLOWED_START = tl.constexpr(words.ALLOWED_START)
ALLOWED_STOP = tl.constexpr(words.ALLOWED_STOP)
STATE_WORDS = tl.constexpr(numbers.STATE_WORDS)
OF_STEP, OF_LENGTH = tl.constexpr(numbers.STEP), tl.constexpr(numbers.LENGTH)
OF_RECENT, OF_PACKED = tl.constexpr(numbers.RECENT_START), tl.constexpr(numbers.PACKED)
OF_SINK, OF_SINCE = tl.constexpr(numbers.SINK), tl.constexpr(numbers.SINCE_SLOW)
OF_REASON, OF_TRIGGERS = tl.constexpr(numbers.REASON), tl.constexpr(numbers.TRIGGERS)
OF_FINISHED = tl.constexpr(numbers.FINISHED)
FAST_STEP, SLOW_START = tl.constexpr(numbers.FAST_STEP), tl.constexpr(numbers.SLOW_START)
TRIGGERED, DUE = tl.constexpr(numbers.TRIGGERED), tl.constexpr(numbers.DUE)
WITH_BATCH = tl.constexpr(numbers.WITH_BATCH)
KEPT_TRIGGERS, BITS = tl.constexpr(numbers.KEPT_TRIGGERS), tl.constexpr(numbers.BITS)
SLOWS, FASTS = tl.constexpr(numbers.SLOWS), tl.constexpr(numbers.FASTS)
IN_TRIGGERS, IN_STOPS = tl.constexpr(numbers.IN_TRIGGERS), tl.constexpr(numbers.IN_STOPS)


@triton.jit
def _holds(bitmap_ptr, token, bitmap_words, own):
    inside = own & (token >= 0) & (token < BITS * bitmap_words)
    word = tl.load(bitmap_ptr + token // BITS, mask=inside, other=0)
    return (word >> (token & (BITS - 1)).to(tl.int32)) & 1


@triton.jit
def _describe(buffer_ptr, B, request, going, slow, length, recent_start, packed, sink):
    exists = request < B
    room = tl.cdiv(B, ALIGNED) * ALIGNED
    listed = request < room
    tl.store(buffer_ptr + request, tl.where(exists, length, -1), mask=listed)
    tl.store(buffer_ptr + room + request, tl.where(exists, length - going, -1), mask=listed)
    tl.store(buffer_ptr + 2 * room + request, tl.where(exists, going, -1), mask=listed)
    place = tl.cumsum(slow) - 1
    for part in tl.static_range(3, LISTS):
        own = listed & (request >= tl.sum(slow))
        tl.store(buffer_ptr + part * room + request, -1, mask=own)
    is_slow = slow > 0
    slow_ptr = buffer_ptr + 3 * room + place
    tl.store(slow_ptr, request, mask=is_slow)
    tl.store(slow_ptr + room, sink, mask=is_slow)
    tl.store(slow_ptr + 2 * room, length, mask=is_slow)
    tl.store(slow_ptr + 3 * room, recent_start, mask=is_slow)

    row = buffer_ptr + LISTS * room + request * WORDS
    tl.store(row + MODE, tl.where(going > 0, FAST + slow, IDLE), mask=exists)
    tl.store(row + LENGTH, length, mask=exists)
    tl.store(row + START, tl.where(is_slow, 0, recent_start), mask=exists)
    tl.store(row + PACKED, tl.where(is_slow, 0, packed), mask=exists)
    tl.store(row + SINK, sink, mask=exists)
    tl.store(row + ALLOWED_START, sink, mask=exists)
    tl.store(row + ALLOWED_STOP, recent_start, mask=exists)
    tl.store(row + EVIDENCE, tl.where(is_slow, place, -1), mask=exists)


@triton.jit(do_not_specialize=[
    "B", "bitmap_words", "slow_start", "min_gap", "t_max", "delay", "budget", "recent", "sliding",
    "synchronized",
])  # fmt: skip
def _advance_kernel(
    token_ptr, bitmap_ptr, state_ptr, summary_ptr, buffer_ptr, dense_buffer_ptr, B, bitmap_words,
    slow_start, min_gap, t_max, delay, budget, recent, sliding, synchronized,
    DENSE: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    request = tl.arange(0, BLOCK_B)
    exists = request < B
    state = state_ptr + request * STATE_WORDS
    length = tl.load(state + OF_LENGTH, mask=exists, other=0)
    recent_start = tl.load(state + OF_RECENT, mask=exists, other=0)
    packed = tl.load(state + OF_PACKED, mask=exists, other=0)
    sink = tl.load(state + OF_SINK, mask=exists, other=0)
    since = tl.load(state + OF_SINCE, mask=exists, other=0)
    step = tl.load(state + OF_STEP, mask=exists, other=0)
    was_slow = tl.load(state + OF_REASON, mask=exists, other=FAST_STEP) != FAST_STEP
    triggers = tl.load(state + OF_TRIGGERS, mask=exists, other=0)
    finished = tl.load(state + OF_FINISHED, mask=exists, other=1)
    token = tl.load(token_ptr + request, mask=exists, other=-1)
    tl.debug_barrier()  # several warps may hold a request: all have read before one writes

    # what the step left that generated the tokens
    live = finished == 0
    chosen = sink + tl.minimum(budget, recent_start - sink)
    packed = tl.where(live & was_slow & (budget > 0), chosen, packed)
    trigger = _holds(bitmap_ptr + IN_TRIGGERS * bitmap_words, token, bitmap_words, live)
    triggers = ((triggers & KEPT_TRIGGERS) << 1) | trigger
    stopped = _holds(bitmap_ptr + IN_STOPS * bitmap_words, token, bitmap_words, live)
    tl.store(state + OF_PACKED, packed, mask=live)
    tl.store(state + OF_TRIGGERS, triggers, mask=live)
    tl.store(state + OF_FINISHED, stopped, mask=live)

    # Eq. 5 and T_max
    goes_on = live & (stopped == 0)
    fires = (((triggers >> delay) & 1) > 0) & (since + 1 >= min_gap)
    reason = tl.where(fires, TRIGGERED, tl.where(since >= t_max, DUE, FAST_STEP))
    reason = tl.where(step + 1 < slow_start, SLOW_START, reason)
    reason = tl.where(goes_on, reason, FAST_STEP)
    joins = (reason == FAST_STEP) & (synchronized * tl.max(reason, 0) > 0)
    reason = tl.where(goes_on & joins, WITH_BATCH, reason)

    is_slow = reason != FAST_STEP
    going, slow = goes_on.to(tl.int32), is_slow.to(tl.int32)
    length += going
    moves = goes_on & (slow + sliding > 0)
    recent_start = tl.where(moves, tl.maximum(sink, length - recent), recent_start)
    tl.store(state + OF_STEP, step + 1, mask=goes_on)
    tl.store(state + OF_LENGTH, length, mask=goes_on)
    tl.store(state + OF_RECENT, recent_start, mask=goes_on)
    tl.store(state + OF_SINCE, tl.where(is_slow, 0, since + 1), mask=goes_on)
    tl.store(state + OF_REASON, reason, mask=goes_on)
    tl.store(summary_ptr + SLOWS, tl.sum(slow))
    tl.store(summary_ptr + FASTS, tl.sum(going - slow))
    _describe(buffer_ptr, B, request, going, slow, length, recent_start, packed, sink)
    if DENSE:
        _describe(dense_buffer_ptr, B, request, going, going, length, recent_start, packed, sink)


def advance(
    token_B: torch.Tensor,
    bitmap_2X: torch.Tensor,
    state_BX: torch.Tensor,
    summary_2: torch.Tensor,
    descriptor: StepDescriptor,
    dense_descriptor: StepDescriptor | None,
    rules: StepRules,
) -> None:
    """See `reference.advance`."""
    check(token_B, bitmap_2X, state_BX, summary_2, descriptor, dense_descriptor, rules)
    B, dense = token_B.shape[0], dense_descriptor or descriptor
    launch(
        _advance_kernel, (1,), token_B, bitmap_2X, state_BX, summary_2, descriptor.buffer,
        dense.buffer, B, bitmap_2X.shape[1], rules.slow_start, rules.min_gap, rules.t_max,
        rules.delay, rules.budget, rules.recent, int(rules.sliding), int(rules.synchronized),
        DENSE=dense_descriptor is not None, BLOCK_B=max(words.ALIGNED, triton.next_power_of_2(B)),
    )  # fmt: skip
