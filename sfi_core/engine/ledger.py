"""What a pass does to the numbers of its requests; the same for every host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from sfi_core.observers.events import StepEvent
from sfi_core.policies.base import Policy
from sfi_core.settings.engine import AuditConfig
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import FAST, IDLE, PROMPT, SLOW

Shape = Mapping[str, Any]  # fields of `StepEvent` that all requests of a batch's step share


@dataclass(frozen=True, slots=True)
class RequestPass:
    """What one request does in a forward pass; a batch may mix all kinds.

    `kind` is IDLE, PROMPT (reads a piece of its prompt), FAST or SLOW (decodes), and `reason` why it is slow.
    `ends_prompt` says whether the piece is the prompt's last: step 0, which is slow (g_0 = 1).
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
    def decode(cls, *, slow: bool, reason: str, count: int = 1) -> Self:
        """Decode one token, or verify: attend densely with `count` tokens, causally."""
        return cls(SLOW if slow else FAST, count, reason)


def plan_step(policy: Policy, states: Sequence[RequestState]) -> list[RequestPass]:
    """Ask the policy what each request does in the next step."""
    return [
        RequestPass() if state.finished else RequestPass.decode(slow=bool(reason), reason=reason)
        for state, reason in zip(states, policy.plan(states), strict=True)
    ]


def enter(state: RequestState, request: RequestPass, policy: Policy) -> None:
    """Enter a pass: count its tokens, and move the recent segment if the pass is a step."""
    if not request.generates:
        state.length += request.count
        return
    if request.ends_prompt:
        state.begin(slow=True, reason=request.reason, new_tokens=request.count)
        state.prompt_tokens = state.length - len(state.tokens)
    else:
        slow = request.kind == SLOW
        state.begin(slow=slow, reason=request.reason, new_tokens=request.count, steps=request.count)
    config = policy.config
    state.move_recent(config.sink, config.recent, sliding=config.recent_mode == "sliding")


class Reads(NamedTuple):
    """What a step of a request reads, in tokens' worth of keys and values per KV head, the mean over layers.

    `attended` is what attention reads, `selecting` what choosing does; `cache read` is the sum of both.
    """

    attended: float
    selecting: float = 0.0

    @classmethod
    def of(
        cls, state: RequestState, policy: Policy, layers: int, dense_layers: int, mixed: float | None = None
    ) -> Self:
        """Count the step under way; the arguments are those of `RequestState.attended`.

        A slow step reads everything already, so that its selection adds no read.
        """
        chosen = 0.0 if state.slow else policy.selection_tokens(state) * (layers - dense_layers) / max(1, layers)
        return cls(state.attended(layers, dense_layers, mixed), chosen)


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A request's step whose token is not known yet; `fields` are those of its `StepEvent` that are known."""

    fields: Mapping[str, Any]

    @classmethod
    def of(cls, state: RequestState, audit: AuditConfig | None, batch_step: int, reads: Reads) -> Self:
        """Note the step that a request has entered."""
        audited = audit is not None and audit.due(state.step, slow=state.slow)
        return cls({**step_fields(state, batch_step, reads), "audited": audited})

    def close(self, state: RequestState, token: int, **more: Any) -> StepEvent:
        """Note the step's token x_t, count the step, and return its event; `more` are its other fields."""
        event = StepEvent(**self.fields, token_id=token, **more)
        state.tokens.append(token)
        if event.slow:
            state.tally.count_slow(event.step, event.reason)
        if event.step > 0:
            state.tally.count_reads(event.attended_tokens, event.context_tokens, event.selection_tokens)
        return event


def step_fields(state: RequestState, batch_step: int, reads: Reads) -> dict[str, Any]:
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
    }


def step_shape(
    slow: Sequence[RequestState], fast: Sequence[RequestState], moved: Callable[[RequestState], float] | None
) -> dict[str, Any]:
    """Return what the requests of a batch's step share, before they close it.

    `slow` read everything, prompts included. `moved` returns the bytes that attention reads for a request;
    None leaves the bytes out.
    """
    states = (*slow, *fast)
    shape: dict[str, Any] = {
        "slow_requests": len(slow),
        "fast_requests": len(fast),
        "cached_tokens": sum(state.length for state in states),
    }
    if moved is not None:
        shape["moved_bytes"] = round(sum(map(moved, states)))
    return shape
