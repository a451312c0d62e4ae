"""What a pass does to the numbers of its requests, the same for every host; and the counters and clock of a run."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from sfi_core.observers.events import StepEvent
from sfi_core.policies.base import Policy
from sfi_core.settings.engine import AuditConfig
from sfi_core.state.request import RequestState
from sfi_kernels.compiled import clock, compiling_seconds
from sfi_kernels.step_descriptor import FAST, IDLE, PROMPT, SLOW

Shape = Mapping[str, Any]  # fields of `StepEvent` that all requests of a batch's step share


@dataclass(frozen=True, slots=True)
class RequestPass:
    """What one request does in a forward pass: `kind` is IDLE, PROMPT (reads a piece of it), FAST or SLOW (decodes).

    `reason` says why it is slow, `ends_prompt` whether the piece is the prompt's last: step 0, which is slow (g_0 = 1).
    """

    kind: int = IDLE
    count: int = 0
    reason: str = ""
    ends_prompt: bool = False

    @property
    def generates(self) -> bool:
        """Whether the request has a next token after the pass."""
        return self.ends_prompt or self.kind in (FAST, SLOW)

    @classmethod
    def prompt(cls, count: int, *, ends: bool) -> Self:
        """Read `count` tokens of the prompt; idle if there are none."""
        return cls(PROMPT, count, "first", ends) if count else cls()

    @classmethod
    def decode(cls, reason: str, count: int = 1) -> Self:
        """Decode one token, densely for a reason, or verify: attend densely with `count` tokens, causally."""
        return cls(SLOW if reason else FAST, count, reason)


def plan_step(policy: Policy, states: Sequence[RequestState]) -> list[RequestPass]:
    """Ask the policy what each request does in the next step."""
    return [
        RequestPass() if state.finished else RequestPass.decode(reason)
        for state, reason in zip(states, policy.plan(states), strict=True)
    ]


def enter(state: RequestState, request: RequestPass, policy: Policy) -> None:
    """Enter a pass: count its tokens, and move the recent segment if the pass is a step."""
    if not request.generates:
        state.length += request.count
        return
    steps = 1 if request.ends_prompt else request.count
    state.begin(slow=request.kind != FAST, reason=request.reason, new_tokens=request.count, steps=steps)
    if request.ends_prompt:
        state.prompt_tokens = state.length - len(state.tokens)
    config = policy.config
    state.move_recent(config.sink, config.recent, sliding=config.recent_mode == "sliding")


class Reads(NamedTuple):
    """What attention and choosing read in a step, in tokens' worth of keys and values per KV head and layer."""

    attended: float
    selecting: float = 0.0

    @classmethod
    def of(
        cls, state: RequestState, policy: Policy, layers: int, dense_layers: int, mixed: float | None = None
    ) -> Self:
        """Count the step under way, as `RequestState.attended`; the selection of a slow step adds no read."""
        chosen = 0.0 if state.slow else policy.selection_tokens(state) * (layers - dense_layers) / max(1, layers)
        return cls(state.attended(layers, dense_layers, mixed), chosen)


def step_fields(state: RequestState, batch_step: int, reads: Reads, audit: AuditConfig | None = None) -> dict[str, Any]:
    """Return the fields of a request's `StepEvent` that are known before its token."""
    return {
        "request": state.request,
        "step": state.step,
        "batch_step": batch_step,
        "position": state.length - 1,
        "slow": state.slow,
        "reason": state.reason,
        "steps_since_slow": state.steps_since_slow,
        "attended_tokens": reads.attended,
        "selection_tokens": reads.selecting,
        "context_tokens": state.length,
        "audited": audit is not None and audit.due(state.step, slow=state.slow),
    }


def close_step(fields: Mapping[str, Any], state: RequestState, token: int, **more: Any) -> StepEvent:
    """Note the token x_t of a step with `step_fields`, count the step, and return its event, which has `more`, too."""
    event = StepEvent(**fields, token_id=token, **more)
    state.tokens.append(token)
    if event.slow:
        state.tally.count_slow(event.step, event.reason)
    if event.step > 0:
        state.tally.count_reads(event.attended_tokens, event.context_tokens, event.selection_tokens)
    return event


def step_shape(
    slow: Sequence[RequestState], fast: Sequence[RequestState], moved: Callable[[RequestState], float] | None
) -> dict[str, Any]:
    """Return what the requests of a batch's step share; `moved` are the bytes read for a request, if known."""
    states = (*slow, *fast)
    cached = sum(state.length for state in states)
    read = {} if moved is None else {"moved_bytes": round(sum(map(moved, states)))}
    return {"slow_requests": len(slow), "fast_requests": len(fast), "cached_tokens": cached, **read}


def steady_seconds(laps: Mapping[tuple[int, ...], Sequence[float]]) -> float:
    """Return the seconds of steps, given by kind, if each took the median of its kind: no first run, no hiccup."""
    return sum(len(seconds) * statistics.median(seconds) for seconds in laps.values())


@dataclass(slots=True)
class Meter:
    """The counters and the clock of one run; times are of `sfi_kernels.compiled.clock`.

    `paths`, `kernels`, `not_replayed`, `not_compiled` and the seconds are those of `RunReport` and `TierReport`. The
    step under way was `replayed` or not. `row_bytes` are the number of layers counted, and a token's bytes of keys and
    values in those that are always dense, and in the others. `recalled` counts rows from the host by the bytes of a
    row, int64, on the device. `laps` has the seconds of decoding steps without recording, by their number of slow and
    of fast requests. The run was made at `born`; the step under way `began`, and the last one `ended`.
    """

    paths: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    not_replayed: str = ""
    not_compiled: str = ""
    replayed: bool = False
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    recording_seconds: float = 0.0
    laps: dict[tuple[int, ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    row_bytes: tuple[int, int, int] = (0, 0, 0)
    recalled: dict[int, torch.Tensor] = field(default_factory=dict)
    recall_seconds: float = 0.0
    born: float = field(default_factory=clock)
    began: float = field(default_factory=clock)
    ended: float = 0.0
    _compiled: float = field(default_factory=compiling_seconds)
    _recorded: float = 0.0

    def count(self, path: str, times: int = 1) -> None:
        """Count calls of a path."""
        self.paths[path] += times

    @property
    def recalled_bytes(self) -> int:
        """Recalled bytes; waits for the device."""
        return sum(size * int(rows) for size, rows in self.recalled.items())

    def begin(self) -> None:
        """Start the clock of a step."""
        self.replayed, self._recorded = False, self.recording_seconds
        self.began = clock()

    def lap(self, kind: tuple[int, ...] | None = None, *, prefill: bool) -> float:
        """End the step and return its seconds; those of a decoding step with a `kind` are kept."""
        self.ended = clock()
        if prefill:
            self.prefill_seconds += self.lasted
        else:
            self.decode_seconds += self.lasted
            if kind is not None:
                self.laps[kind].append(self.lasted - self.recording_seconds + self._recorded)
        return self.lasted

    @property
    def compiling_seconds(self) -> float:
        """The seconds that numba compiled since the run was made."""
        return compiling_seconds() - self._compiled

    @property
    def lasted(self) -> float:
        """The seconds of the last step that has ended."""
        return self.ended - self.began
