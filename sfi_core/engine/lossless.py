"""Lossless decoding: fast steps draft, a slow step over the drafted tokens verifies them.

On a GPU drafts are chained: a step takes the token of the one before from the device, and the host reads them when they
are verified. A token that it has not read is in `RequestState.tokens` as -1 - n, n its place in `Drafts.unread_N`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

import torch

from sfi_core.engine.audit import compare_logits
from sfi_core.engine.batch_pass import BatchPass
from sfi_core.engine.ledger import Reads, RequestPass, Shape, step_fields
from sfi_core.engine.picking import Picks
from sfi_core.engine.run import Counting, Run, note_selected
from sfi_core.machine.text import common_prefix
from sfi_core.observers.events import LogitsEvent, StepEvent, VerificationEvent
from sfi_core.observers.observer import HeldSelections
from sfi_core.policies.base import Policy, Triggered
from sfi_core.settings.config import DraftConfig
from sfi_core.state.request import RequestState


class Costs(NamedTuple):
    """What a drafting step costs, and a verification by its number of drafted tokens, in one unit."""

    fast: float
    verification: Callable[[int], float]


Cost = Callable[[float, float], Costs]  # from the cached tokens and those that a fast step reads

# added to a request's counts of tested and accepted drafts, so that its acceptance rate starts at 0.995
TRIED, KEPT = 20.0, 19.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRule:
    """Decides whether a request drafts or verifies next; `selecting` is `Policy.selection_tokens`."""

    config: DraftConfig
    stop_ids: frozenset[int]
    cost: Cost | None = None
    selecting: Callable[[RequestState], float] = lambda _: 0.0

    def reason(self, state: RequestState, room: int, planned: str, limit: int) -> str:
        """Return why a request verifies now, or "" if it drafts.

        It may still generate `room` tokens, drafted ones included. `planned` is the policy's reason for a slow step,
        `limit` what `limit` returned when the draft began.
        """
        if not state.fresh:
            return "rejected"
        if planned:
            return planned
        if state.drafted + 1 >= room:  # a verification gives one token more than it tests
            return "room"
        if not self.stop_ids.isdisjoint(state.tokens[len(state.tokens) - state.drafted :]):
            return "stop"
        return "limit" if state.drafted >= limit else ""

    def limit(self, state: RequestState) -> int:
        """Return how many tokens a request drafts at most before a verification, when it begins to."""
        most = self.config.max_tokens
        if not self.config.adaptive or self.cost is None:
            return most
        tally = state.tally
        rate = (KEPT + tally.accepted) / (TRIED + tally.tested)
        read = state.fast_tokens + self.selecting(state)
        return best_length(rate, self.cost(state.length, read), most)


def best_length(rate: float, costs: Costs, most: int) -> int:
    """Return the draft length, 1 to `most`, with the most tokens per cost.

    k drafts, each accepted at `rate` if all before it are, give (1 - rate^(k + 1)) / (1 - rate) tokens. They
    cost k fast steps and one verification (Leviathan et al., 2023, arXiv:2211.17192, Eq. 1 and Theorem 3.8).
    """

    def speed(k: int) -> float:
        return sum(rate**i for i in range(k + 1)) / (costs.verification(k) + k * costs.fast)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedPass:
    """A pass whose tokens the device picks: batch step `step`, and each row's state in it.

    `fields` are those of `StepEvent` that are known, `logits` those of drafting rows, if an observer compares them.
    """

    picks: Picks
    step: int
    batch_pass: BatchPass
    states: list[RequestState]
    counting: Counting | None
    fields: Shape
    logits: dict[int, torch.Tensor]


def unread_steps(policy: Policy) -> float:
    """Return how many of the last tokens a policy does not look at when it plans a step."""
    if not policy.triggered:
        return math.inf
    if type(policy).plan is not Triggered.plan:
        return 0
    config = policy.config
    return config.trigger_delay if config.trigger_policy in ("boundary", "random") else math.inf


@dataclass(slots=True)
class Drafts:
    """The drafts of one run, from the end of its prompts; `limits` are the most new tokens of each request.

    `read` waits for picked tokens. A drafting step's event, for the observer if the token is accepted, and logits, None
    if no observer compares them, wait until the token is verified. `outcome` decides how many drafts are accepted, for
    benchmarks with random weights; None accepts those that full attention picks too. `blocks` has each row's input of
    the pass under way; None for an idle row.
    """

    run: Run
    rule: DraftRule
    limits: Sequence[int]
    read: Callable[[Picks], list[int]]
    outcome: Outcome | None = None
    blocks: list[Block | None] = field(default_factory=list)
    _observer: HeldSelections = field(init=False)
    _chain: list[PickedPass] = field(default_factory=list)  # those after the first `_settled` are unread
    _settled: int = 0
    _lengths: dict[int, int] = field(default_factory=dict)  # of each request's draft, at most
    _steps: dict[int, list[tuple[StepEvent, torch.Tensor | None]]] = field(default_factory=dict)
    _shape: Shape = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Hold back the run's selection events until their tokens are verified."""
        self.run.observer = self._observer = HeldSelections(self.run.observer)

    @property
    def unread_N(self) -> torch.Tensor | None:
        """Tokens that blocks name as -1, -2, ... because the host has not read them; None if there are none."""
        return torch.cat([each.picks.token_X for each in self._chain]) if self._chain else None

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

    def record(self, picks: Picks, logits_XV: torch.Tensor, *, chained: bool = False) -> list[list[int]]:
        """Note the tokens picked at every position of the pass; return those that each row's verification gives.

        If `chained`, the next pass takes tokens from the device: those that do not decide about it stay unread.
        """
        run, place, token_X = self.run, 0, list[int]()
        self._note(picks, logits_XV)
        verifies = any(block is not None and block.reason for block in self.blocks)
        unread = unread_steps(run.policy) if chained and not verifies else 0
        while len(self._chain) - self._settled > unread:
            token_X = self._settle(self._chain[self._settled])
            self._settled += 1
        if self._settled == len(self._chain):
            self._chain, self._settled = [], 0
        given: list[list[int]] = []
        for state, block in zip(run.requests, self.blocks, strict=True):
            positions = slice(place, place + (len(block.tokens) if block else 0))
            place = positions.stop
            given.append([])
            if block is not None and block.reason:
                given[-1] = self._verified(state, block, token_X[positions], logits_XV[positions])
        run.recorded = True
        return given

    def drop(self) -> None:
        """Take every draft back at the end of the run: unverified tokens are not generated."""
        for state in self.run.requests:
            self._take_back(state)
            self._observer.keep(state.request, 0)
        self._steps.clear()
        self._chain, self._settled = [], 0

    def _block(self, state: RequestState, planned: str) -> Block:
        verified = len(state.tokens) - state.drafted
        room = self.limits[state.request] - verified
        if not state.drafted:
            self._lengths[state.request] = self.rule.limit(state)
        reason = self.rule.reason(state, room, planned, self._lengths[state.request])
        draft = tuple(state.tokens[verified:])
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

    def _note(self, picks: Picks, logits_XV: torch.Tensor) -> None:
        run, before = self.run, sum(len(each.picks.row_X) for each in self._chain)
        fields = {"elapsed_us": run.lap() * 1e6, "graphs": run.meter.replayed}
        states, logits = [replace(state) for state in run.requests], {}
        for row in run.batch_pass.fast:
            state, place = run.requests[row], picks.row_X.index(row)
            state.tokens.append(-1 - before - place)
            state.drafted += 1
            if LogitsEvent in run.observer.wants:
                logits[row] = logits_XV[place].clone()
        noted = PickedPass(
            picks=picks, step=run.step, batch_pass=run.batch_pass, states=states, counting=run.counting, fields=fields,
            logits=logits,
        )  # fmt: skip
        self._chain.append(noted)

    def _settle(self, done: PickedPass) -> list[int]:
        # read a pass's tokens, and count its drafting steps; those behind a drafted stop token never were
        run, token_X, rows = self.run, self.read(done.picks), done.batch_pass.fast
        note_selected(done.counting, {row: done.states[row] for row in rows})
        self._shape = {**run.shape(done.batch_pass, done.states), **done.fields}
        for row in rows:
            now, state, token = run.requests[row], done.states[row], token_X[done.picks.row_X.index(row)]
            now.unfilled = state.unfilled
            if state.step < len(now.tokens):  # else it is being verified
                now.tokens[state.step] = token
            steps = self._steps.setdefault(state.request, [])
            if steps and steps[-1][0].token_id in self.rule.stop_ids:
                continue
            reads = run.reads(state)
            state.tally.count_reads(reads.attended, 0, reads.selecting)
            fields = step_fields(state, done.step, reads)
            event = StepEvent(**fields, token_id=token, draft_token_id=token, drafted=True, **self._shape)
            steps.append((event, done.logits.get(row)))
        return token_X

    def _verified(
        self, state: RequestState, block: Block, token_W: Sequence[int], logits_WV: torch.Tensor
    ) -> list[int]:
        run, tally, draft = self.run, state.tally, [step.token_id for step, _ in self._steps.get(state.request, ())]
        drafted, over = len(draft), len(block.drafted) - len(draft)  # over: behind a stop token that was read late
        state.length -= over
        state.step -= over
        if over or (block.reason == "limit" and not self.rule.stop_ids.isdisjoint(draft)):
            state.reason = "stop"
        token_W = token_W[: drafted + 1]
        accepted = common_prefix(draft, token_W)
        if self.outcome is not None:
            accepted = self.outcome(state, draft, token_W)
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
        self._tell(state, draft, verified, read, logits_WV)
        return given

    def _tell(
        self, state: RequestState, draft: Sequence[int], verified: int, read: int, logits_WV: torch.Tensor
    ) -> None:
        # the verification first, then its tokens in the order of the steps
        run, drafted = self.run, len(draft)
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
        other = draft[verified] if verified < drafted else None
        fields = step_fields(state, run.step, Reads(state.length))
        run.observer.on(StepEvent(**fields, token_id=state.tokens[-1], draft_token_id=other, **self._shape))


def until_stop(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """Cut tokens after the first stop token."""
    before = list(takewhile(lambda token: token not in stop_ids, tokens))
    return [*tokens[: len(before) + 1]]
