"""Lossless decoding: fast steps draft, a slow step over the drafted tokens verifies them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from sfi_core.engine.audit import compare_logits
from sfi_core.engine.ledger import Reads, RequestPass, Shape, step_fields
from sfi_core.engine.run import Run
from sfi_core.observers.events import LogitsEvent, StepEvent, VerificationEvent
from sfi_core.observers.observer import HeldSelections
from sfi_core.settings.config import DraftConfig
from sfi_core.state.request import RequestState

# the cost of a fast step as a share of a verification's, from the cached tokens and those a fast step reads
Cost = Callable[[float, float], float]

# added to a request's counts of tested and accepted drafts, so that its acceptance rate starts at 0.995
TRIED, KEPT = 20.0, 19.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRule:
    """Decides whether a request drafts or verifies next; `cost` is in (0, 1], `selecting` `Policy.selection_tokens`."""

    config: DraftConfig
    stop_ids: frozenset[int]
    cost: Cost | None = None
    selecting: Callable[[RequestState], float] = lambda _: 0.0

    def reason(self, state: RequestState, room: int, planned: str) -> str:
        """Return why a request verifies now, or "" if it drafts.

        It may still generate `room` tokens, drafted ones included. `planned` is the policy's reason for a slow step.
        """
        if not state.fresh:
            return "rejected"
        if planned:
            return planned
        if state.drafted + 1 >= room:  # a verification gives one token more than it tests
            return "room"
        if state.drafted and state.tokens[-1] in self.stop_ids:
            return "stop"
        return "limit" if state.drafted >= self.limit(state) else ""

    def limit(self, state: RequestState) -> int:
        """Return how many tokens a request drafts at most before a verification."""
        most = self.config.max_tokens
        if not self.config.adaptive or self.cost is None:
            return most
        tally = state.tally
        rate = (KEPT + tally.accepted) / (TRIED + tally.tested)
        read = state.fast_tokens + self.selecting(state)
        return best_length(rate, self.cost(state.length, read), most)


def best_length(rate: float, cost: float, most: int) -> int:
    """Return the draft length, 1 to `most`, with the most tokens per cost.

    k drafts, each accepted at `rate` if all before it are, give (1 - rate^(k + 1)) / (1 - rate) tokens. They
    cost k fast steps, each `cost` of a verification, and one verification (Leviathan et al., 2023,
    arXiv:2211.17192, Eq. 1 and Theorem 3.8).
    """

    def speed(k: int) -> float:
        return sum(rate**i for i in range(k + 1)) / (1 + k * cost)

    return max(range(1, most + 1), key=speed)


# returns how many drafted tokens of a request a verification accepts, given the draft and the verified tokens
Outcome = Callable[[RequestState, Sequence[int], Sequence[int]], int]


@dataclass(frozen=True, slots=True)
class Block:
    """The input `tokens` of a request in a pass: the last verified one and the draft, or to draft the last of these.

    `drafted` is the draft so far, `reason` why the request verifies; "" if it drafts.
    """

    tokens: tuple[int, ...]
    drafted: tuple[int, ...] = ()
    reason: str = ""


@dataclass(slots=True)
class Drafts:
    """The drafts of one run, from the end of its prompts; `limits` are the most new tokens of each request.

    A drafting step's event, for the observer if the token is accepted, and logits, None if no observer compares them,
    wait until the token is verified. `outcome` decides how many drafts are accepted, for benchmarks with random
    weights; None accepts those that full attention picks too. `blocks` has each row's input of the pass under way; None
    for an idle row.
    """

    run: Run
    rule: DraftRule
    limits: Sequence[int]
    outcome: Outcome | None = None
    blocks: list[Block | None] = field(default_factory=list)
    _observer: HeldSelections = field(init=False)
    _steps: dict[int, list[tuple[StepEvent, torch.Tensor | None]]] = field(default_factory=dict)
    _shape: Shape = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Hold back the run's selection events until their tokens are verified."""
        self.run.observer = self._observer = HeldSelections(self.run.observer)

    def plan(self) -> list[Block | None]:
        """Decide about the next pass; a verification overwrites the keys and values of the draft that it takes back."""
        run = self.run
        rows = zip(run.requests, run.policy.plan(run.requests), strict=True)
        self.blocks = [None if state.finished else self._block(state, planned) for state, planned in rows]
        for state, block in zip(run.requests, self.blocks, strict=True):
            if block is not None and block.reason:
                self._take_back(state)
        return self.blocks

    def begin(self) -> None:
        """Enter the pass that is planned."""
        decode = RequestPass.decode
        self.run.begin([decode(block.reason, len(block.tokens)) if block else RequestPass() for block in self.blocks])

    def positions(self) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        """Return the row of every token to pick, how many drafted tokens precede it, and which."""
        tails = [
            (row, block.drafted[:count])
            for row, block in enumerate(self.blocks)
            if block is not None
            for count in range(0 if block.reason else len(block.drafted), len(block.drafted) + 1)
        ]
        return [row for row, _ in tails], [len(tail) for _, tail in tails], [tail for _, tail in tails]

    def record(self, token_X: Sequence[int], logits_XV: torch.Tensor) -> list[list[int]]:
        """Note the tokens picked at every position of the pass; return those that each row's verification gives."""
        run, place = self.run, 0
        run.settle_selected()
        given: list[list[int]] = []
        self._shape = {"elapsed_us": run.lap() * 1e6, **run.shape()}
        for state, block in zip(run.requests, self.blocks, strict=True):
            positions = slice(place, place + (len(block.tokens) if block else 0))
            place = positions.stop
            given.append([])
            if block is not None and block.reason:
                given[-1] = self._verified(state, block, token_X[positions], logits_XV[positions])
            elif block is not None:
                self._drafted(state, token_X[positions.start], logits_XV[positions.start])
        run.recorded = True
        return given

    def drop(self) -> None:
        """Take every draft back at the end of the run: unverified tokens are not generated."""
        for state in self.run.requests:
            self._take_back(state)
            self._observer.keep(state.request, 0)
        self._steps.clear()

    def _block(self, state: RequestState, planned: str) -> Block:
        verified = len(state.tokens) - state.drafted
        room = self.limits[state.request] - verified
        reason, draft = self.rule.reason(state, room, planned), tuple(state.tokens[verified:])
        return Block((state.tokens[verified - 1], *draft) if reason else (state.tokens[-1],), draft, reason)

    def _take_back(self, state: RequestState) -> None:
        state.step -= state.drafted
        state.length -= state.drafted
        del state.tokens[len(state.tokens) - state.drafted :]
        if state.drafted > self.run.policy.config.recent:  # positions beyond J
            row = self.run.requests.index(state)
            for kept in self.run.kept.values():
                kept.rewind(row, state.length)
        state.drafted = 0

    def _drafted(self, state: RequestState, token: int, logits_V: torch.Tensor) -> None:
        run = self.run
        state.finish_step(token)
        state.drafted += 1
        reads = run.reads(state)
        state.tally.count_reads(reads.attended, 0, reads.selecting)
        fields = step_fields(state, run.step, reads)
        event = StepEvent(**fields, token_id=token, draft_token_id=token, drafted=True, **self._shape)
        logits = logits_V.clone() if LogitsEvent in run.observer.wants else None
        self._steps.setdefault(state.request, []).append((event, logits))

    def _verified(
        self, state: RequestState, block: Block, token_W: Sequence[int], logits_WV: torch.Tensor
    ) -> list[int]:
        run, tally, drafted = self.run, state.tally, len(block.drafted)
        accepted = matching(block.drafted, token_W)
        if self.outcome is not None:
            accepted = self.outcome(state, block.drafted, token_W)
        given = until_stop(token_W[: accepted + 1], self.rule.stop_ids)
        verified, read = len(given) - 1, state.length
        state.length -= drafted - verified
        state.step -= drafted - verified
        # a rejected token makes the selection of the last query stale
        state.fresh = verified == drafted or not run.policy.refreshes()
        state.tokens += given[:-1]
        state.finish_step(given[-1])
        state.finished = given[-1] in self.rule.stop_ids or (len(state.tokens) >= self.limits[state.request])
        tally.count_reads(read, sum(range(state.length - verified, state.length + 1)), 0.0)
        tally.count_verification(drafted, accepted)
        tally.time_step(state.step, run.meter.began, run.meter.ended)
        self._tell(state, block, verified, read, logits_WV)
        return given

    def _tell(self, state: RequestState, block: Block, verified: int, read: int, logits_WV: torch.Tensor) -> None:
        # the verification first, then its tokens in the order of the steps
        run, drafted = self.run, len(block.drafted)
        steps = self._steps.pop(state.request, [])
        selects = run.policy.refreshes() and state.fresh
        if state.fresh and not run.policy.chooses:
            self._observer.settle(state.request, state.step)
        else:  # where each fast step made its own selection, those of accepted tokens
            self._observer.keep(state.request, state.step if run.policy.chooses else 0)
        event = VerificationEvent(
            request=state.request, step=state.step, batch_step=run.step, base=state.length - verified - 1,
            drafted=drafted, accepted=verified, reason=state.reason,
            evidence_position=read - 1 if selects else None,
            attended_tokens=read + sum(step.attended_tokens for step, _ in steps),
            selection_tokens=sum(step.selection_tokens for step, _ in steps),
            elapsed_us=self._shape["elapsed_us"],
        )  # fmt: skip
        run.observer.on(event)
        ours = [logits_V for _, logits_V in steps[: verified + 1] if logits_V is not None]
        if ours:
            compared = compare_logits(torch.stack(ours), logits_WV[: len(ours)])
            tested = tuple(range(state.step - verified, state.step - verified + len(ours)))
            run.observer.on(LogitsEvent(requests=(state.request,) * len(ours), steps=tested, **compared))
        for step, _ in steps[:verified]:
            run.observer.on(step)
        other = block.drafted[verified] if verified < drafted else None
        fields = step_fields(state, run.step, Reads(state.length))
        run.observer.on(StepEvent(**fields, token_id=state.tokens[-1], draft_token_id=other, **self._shape))


def matching(draft: Sequence[int], token_W: Sequence[int]) -> int:
    """Return how many tokens of a draft agree with full attention's, up to the first that does not."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(draft, token_W, strict=False))])


def until_stop(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """Cut tokens after the first stop token."""
    before = list(takewhile(lambda token: token not in stop_ids, tokens))
    return [*tokens[: len(before) + 1]]
