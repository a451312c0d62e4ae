"""Advancing a batch by a step, request by request in plain numbers: `advance` as it is meant."""

from collections.abc import Sequence

import torch

from sfi_kernels.advance.state import (
    BITS,
    DUE,
    FAST_STEP,
    FINISHED,
    IN_STOPS,
    IN_TRIGGERS,
    KEPT_TRIGGERS,
    LENGTH,
    MOST,
    MOST_DELAY,
    PACKED,
    REASON,
    RECENT_START,
    SINCE_SLOW,
    SINK,
    SLOW_START,
    STATE_WORDS,
    STEP,
    TRIGGERED,
    TRIGGERS,
    WITH_BATCH,
    StepRules,
)
from sfi_kernels.shapes import check_int32, check_shape
from sfi_kernels.step_descriptor import (
    FAST,
    FIRST,
    IDLE,
    LISTS,
    SLOW,
    StepDescriptor,
    StepRequest,
    describe_step,
    list_room,
)


def advance(
    token_B: torch.Tensor,
    bitmap_2X: torch.Tensor,
    state_BX: torch.Tensor,
    summary_2: torch.Tensor,
    descriptor: StepDescriptor,
    dense_descriptor: StepDescriptor | None,
    rules: StepRules,
) -> None:
    """Take the tokens that a step generated and describe the next one, in place, with no host in between.

    The descriptors become those of `describe_step`, with each request slow, fast, or idle once a stop token
    ended it; the work, with its words in the table, is left to `split_plan`. A request moves 148 bytes, and
    60 more with a second descriptor.

    Args:
        token_B: The tokens x_t, int64; a finished request's does not matter.
        bitmap_2X: T_trig and the stop tokens, from `bitmaps`; a token beyond them is in neither.
        state_BX: The requests' words, [B, STATE_WORDS] int32, as of the step that generated the tokens.
        summary_2: Gets the number of slow and of fast requests, int32; both are 0 when all have finished.
        descriptor: The next step; of its attributes only the buffer is kept up.
        dense_descriptor: The same with every request slow, for layers left dense; None without such.
        rules: When a step is slow, and what it leaves.

    Raises:
        ValueError: The shapes, dtypes or devices do not fit, or a rule is out of range.
    """
    check(token_B, bitmap_2X, state_BX, summary_2, descriptor, dense_descriptor, rules)
    bitmaps, states = bitmap_2X.tolist(), state_BX.tolist()
    for state, token in zip(states, token_B.tolist(), strict=True):
        if not state[FINISHED]:
            _end(state, token, bitmaps, rules)
    going = [state for state in states if not state[FINISHED]]
    reasons = [_reason(state, rules) for state in going]
    if rules.synchronized and any(reasons):
        reasons = [reason or WITH_BATCH for reason in reasons]
    for state, reason in zip(going, reasons, strict=True):
        _begin(state, reason, rules)
    state_BX.copy_(torch.tensor(states, dtype=torch.int32))
    slows = sum(1 for reason in reasons if reason)
    summary_2.copy_(torch.tensor([slows, len(going) - slows], dtype=torch.int32))
    _describe(descriptor, states, dense=False)
    if dense_descriptor is not None:
        _describe(dense_descriptor, states, dense=True)


def _end(state: list[int], token: int, bitmaps: Sequence[Sequence[int]], rules: StepRules) -> None:
    if state[REASON] and rules.budget:
        allowed = state[RECENT_START] - state[SINK]
        state[PACKED] = state[SINK] + min(rules.budget, allowed)
    trigger = _holds(bitmaps[IN_TRIGGERS], token)
    state[TRIGGERS] = (state[TRIGGERS] & KEPT_TRIGGERS) << 1 | trigger
    state[FINISHED] = _holds(bitmaps[IN_STOPS], token)


def _reason(state: list[int], rules: StepRules) -> int:
    if state[STEP] + 1 < rules.slow_start:
        return SLOW_START
    fires = state[TRIGGERS] >> rules.delay & 1
    if fires and state[SINCE_SLOW] + 1 >= rules.min_gap:
        return TRIGGERED
    return DUE if state[SINCE_SLOW] >= rules.t_max else FAST_STEP


def _begin(state: list[int], reason: int, rules: StepRules) -> None:
    state[STEP] += 1
    state[LENGTH] += 1
    state[SINCE_SLOW] = 0 if reason else state[SINCE_SLOW] + 1
    state[REASON] = reason
    if reason or rules.sliding:
        state[RECENT_START] = max(state[SINK], state[LENGTH] - rules.recent)


def _describe(descriptor: StepDescriptor, states: Sequence[list[int]], *, dense: bool) -> None:
    requests = [
        StepRequest(
            mode=IDLE if state[FINISHED] else SLOW if dense or state[REASON] else FAST,
            length=state[LENGTH],
            recent_start=state[RECENT_START],
            packed=state[PACKED],
            sink=state[SINK],
            count=1 - state[FINISHED],
        )
        for state in states
    ]
    made, lists = describe_step(requests, 0, torch.device("cpu")), LISTS * list_room(len(states))
    descriptor.buffer[:lists] = made.buffer[:lists]
    descriptor.table_BX[:, :FIRST] = made.table_BX[:, :FIRST]


def _holds(bitmap: Sequence[int], token: int) -> int:
    return bitmap[token // BITS] >> token % BITS & 1 if 0 <= token < BITS * len(bitmap) else 0


def check(
    token_B: torch.Tensor,
    bitmap_2X: torch.Tensor,
    state_BX: torch.Tensor,
    summary_2: torch.Tensor,
    descriptor: StepDescriptor,
    dense_descriptor: StepDescriptor | None,
    rules: StepRules,
) -> None:
    """Raise where `advance` says so."""
    check_shape(token_B, "token", B=None)
    B = token_B.shape[0]
    check_shape(bitmap_2X, "bitmap", C=2, X=None)
    check_shape(state_BX, "state", B=B, X=STATE_WORDS)
    check_shape(summary_2, "summary", C=2)
    tensors = {"bitmap": bitmap_2X, "state": state_BX, "summary": summary_2}
    for name, step in (("descriptor", descriptor), ("dense_descriptor", dense_descriptor)):
        if step is not None:
            tensors[name] = step.buffer
            if step.batch != B:
                raise ValueError(f"{name} must be of {B} requests, got {step.batch}")
    check_int32(token_B.device, **tensors)
    if token_B.dtype != torch.int64 or not token_B.is_contiguous():
        got = f"{token_B.dtype} with strides {token_B.stride()}"
        raise ValueError(f"token must be contiguous int64, got {got}")
    for name, most in (("delay", MOST_DELAY), ("t_max", MOST)):
        value = getattr(rules, name)
        if not 0 <= value <= most:
            raise ValueError(f"{name} must be in [0, {most}], got {value}")
