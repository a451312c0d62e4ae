"""A lossless run made up from a seed and told to an observer: drafts, verifications, rejected tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sfi_core.observers.events import BeginStepEvent, LogitsEvent, PromptEvent, VerificationEvent
from sfi_core.observers.observer import Observer
from tests.traces.made import CONFIG, STOP
from tests.traces.told import run_event, step_event

MOST, WRONG, PROMPT = 6, 88, 50
DRAFT = {"max_tokens": MOST, "adaptive": False}
LOSSLESS = CONFIG | {"draft": DRAFT}


def token_of(request: int, step: int) -> int:
    """Full attention's token: a sentence has 9 or more tokens."""
    return STOP if step % (9 + request) == 8 else step % 80


@dataclass
class Drafting:
    """One request of the run: `block` holds what is drafted since the last verification."""

    request: int
    most: int
    given: int = 1
    fresh: bool = True
    block: list[int] = field(default_factory=list)
    attended: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    @property
    def base(self) -> int:
        return PROMPT + self.given - 1

    @property
    def reason(self) -> str:
        """Why the draft ends here; "" where it goes on."""
        last = self.block[-1] if self.block else token_of(self.request, self.given - 1)
        if not self.fresh:
            return "rejected"
        if last == STOP:
            return "trigger"
        if len(self.block) == self.most - self.given - 1:
            return "room"
        return "limit" if len(self.block) == MOST else ""


class LosslessRun:
    """Tells one run; a draft is right with probability `right`.

    Attributes:
        verifications: The events told.
        tokens: The tokens given, by request.
    """

    def __init__(
        self,
        observer: Observer,
        *,
        most: Sequence[int] = (60,),
        right: float = 0.9,
        seed: int = 0,
        lossless: bool = True,
        after: int | None = None,
    ) -> None:
        """Tell it; `after` breaks off after so many verifications."""
        self._observer, self._right, self._rng = observer, right, random.Random(seed)
        self.verifications: list[VerificationEvent] = []
        self.tokens = [[token_of(request, 0)] for request in range(len(most))]
        batch = range(len(most))
        observer.on(run_event(len(most), config=LOSSLESS, trigger_token_ids=(STOP,), audit=None, lossless=lossless))
        ids = torch.arange(PROMPT).repeat(len(most), 1)
        observer.on(PromptEvent(requests=tuple(batch), ids_BT=ids, count=(PROMPT,) * len(most)))
        observer.on(BeginStepEvent(step=0, slow=tuple(batch), fast=()))
        with observer.span("prefill"):
            pass
        for request in batch:
            self._tell_step(request, 0, 0, reason="first", attended=float(PROMPT))
        states, number = [Drafting(request, count) for request, count in enumerate(most)], 0
        while alive := [state for state in states if state.given < state.most]:
            number += 1
            self._step(number, alive)
            if after is not None and len(self.verifications) >= after:
                return

    def _step(self, number: int, alive: list[Drafting]) -> None:
        verified = [state for state in alive if state.reason]
        drafting = [state for state in alive if not state.reason]
        ids = [tuple(state.request for state in states) for states in (verified, drafting)]
        self._observer.on(BeginStepEvent(step=number, slow=ids[0], fast=ids[1]))
        name = "dense" if not drafting else "mixed" if verified else "fast"
        with self._observer.span("forward"), self._observer.span(f"attention.{name}", 0, 512):
            pass
        for state in drafting:
            own = token_of(state.request, state.given + len(state.block))
            state.block.append(own if self._rng.random() < self._right else WRONG)
            state.attended.append(20.0 + len(state.block))
            state.passes.append(number)
        for state in verified:
            self._verify(number, state)

    def _verify(self, number: int, state: Drafting) -> None:
        own = [token_of(state.request, state.given + i) for i in range(len(state.block) + 1)]
        pairs = zip(own, state.block, strict=False)
        accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(state.block))
        drafted, reason, step = len(state.block), state.reason, state.given + accepted
        context = state.base + drafted + 1
        event = VerificationEvent(
            request=state.request, step=step, batch_step=number, base=state.base, drafted=drafted,
            accepted=accepted, reason=reason,
            evidence_position=state.base + drafted if accepted == drafted else None,
            attended_tokens=sum(state.attended) + context, elapsed_us=900.0 + number,
        )  # fmt: skip
        self._observer.on(event)
        self.verifications.append(event)
        tested = [state.given + i for i in range(min(drafted, accepted + 1))]
        self._observer.on(
            LogitsEvent(
                requests=(state.request,) * len(tested), steps=tuple(tested),
                kl_R=torch.full((len(tested),), 0.25),
                agrees_R=torch.tensor([i < accepted for i in range(len(tested))], dtype=torch.bool),
                dense_token_R=torch.zeros(len(tested), dtype=torch.int64),
                dense_probability_R=torch.ones(len(tested)),
            )
        )  # fmt: skip
        for i in range(accepted):
            self._tell_step(
                state.request, state.given + i, state.passes[i], depth=i + 1, draft=state.block[i],
                attended=state.attended[i],
            )  # fmt: skip
        wrong = state.block[accepted] if accepted < drafted else None
        length = float(state.base + accepted + 1)
        self._tell_step(state.request, step, number, reason=reason, draft=wrong, attended=length)
        self.tokens[state.request] += own[: accepted + 1]
        state.given, state.fresh = step + 1, accepted == drafted
        state.block, state.attended, state.passes = [], [], []

    def _tell_step(
        self,
        request: int,
        step: int,
        batch_step: int,
        *,
        depth: int = 0,
        reason: str = "",
        draft: int | None = None,
        attended: float,
    ) -> None:
        self._observer.on(
            step_event(
                request, step, batch_step=batch_step, position=PROMPT + step - 1, slow=not depth,
                token_id=token_of(request, step), reason=reason, steps_since_slow=depth,
                attended_tokens=attended, context_tokens=PROMPT + step, draft_token_id=draft,
                elapsed_us=300.0 + batch_step if depth else 900.0 + batch_step, drafted=depth > 0,
            )
        )  # fmt: skip
