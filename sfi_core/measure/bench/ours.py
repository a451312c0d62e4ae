"""Runs of our policies, sparse or lossless with a stated acceptance, of given tokens, as by `sfi_core.generate`."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from sfi_core.engine.loop import Loop, NewTokens
from sfi_core.engine.maintenance import main_stream
from sfi_core.engine.picking import Picks
from sfi_core.engine.report import RunReport
from sfi_core.engine.run import Run
from sfi_core.generation.sampling import Sampler
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.replays import records_steps
from sfi_core.hosts.transformers.session import Session
from sfi_core.hosts.transformers.slow_fast import session_on
from sfi_core.machine.memory import peak_bytes, reset_peak
from sfi_core.measure.bench.runs import BenchRow, DecodeSample, DecodeVariant, Read
from sfi_core.measure.bench.settings import DecodeSettings, Point
from sfi_core.policies import policy_class
from sfi_core.policies.base import Triggered
from sfi_core.settings.engine import Sampling
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import sent

Ahead = Callable[[torch.Tensor], None]
DRAFTING = ("verifications", "accepted")  # counts of a lossless run's requests


class GivenTokens(Sampler):
    """Picks given tokens, in drafts and verifications too: the device makes their logits the largest."""

    def __init__(self, ids_BT: torch.Tensor, token_SB: Sequence[Sequence[int]], ahead: Ahead) -> None:
        super().__init__(Sampling(), ids_BT, ahead=ahead)
        self._token_SB = torch.tensor(token_SB, device=ids_BT.device)

    def __call__(self, logits_BV: torch.Tensor, finished_B: list[bool]) -> list[int]:
        """Pick the next token of every request; all have the same number of tokens before it."""
        self._raise(logits_BV, self._token_SB[self.rows[0].step])
        return super().__call__(logits_BV, finished_B)

    def draw(
        self, logits_XV: torch.Tensor, row_X: Sequence[int], offset_X: Sequence[int], tail: Sequence[Sequence[int]]
    ) -> Picks:
        """See `Sampler.draw`."""
        steps = [self.rows[place].step + offset for place, offset in zip(row_X, offset_X, strict=True)]
        at_2X = sent(torch.tensor([steps, list(row_X)]), logits_XV.device)
        self._raise(logits_XV, self._token_SB[at_2X[0], at_2X[1]])
        return super().draw(logits_XV, row_X, offset_X, tail)

    @staticmethod
    def _raise(logits_XV: torch.Tensor, token_X: torch.Tensor) -> None:
        logits_XV.scatter_(1, token_X[:, None], torch.finfo(logits_XV.dtype).max)


@dataclass(frozen=True, slots=True)
class StatedAcceptance:
    """Keeps drafted tokens by chance: the `outcome` of a lossless run with stated acceptance."""

    rate: float  # the chance that a token is kept if all before it are, in [0, 1]
    seed: int  # the outcome of a token depends on this seed, its request and its index, not on the batch

    def __call__(self, state: RequestState, draft: Sequence[int], _: Sequence[int]) -> int:
        """Return how many tokens of a request's draft are kept; `state.step` follows the draft."""
        first = state.step - len(draft)
        for place in range(len(draft)):
            rng = random.Random(f"{self.seed} {state.request} {first + place}")  # noqa: S311 - no secret
            if rng.random() >= self.rate:
                return place
        return len(draft)


@torch.inference_mode()
def run_ours(row: BenchRow) -> DecodeSample:
    """Decode the given tokens under a policy; in a lossless run a step is a pass, and chance decides what is kept."""
    model, variant, settings, prompts, batch = row.model, row.variant, row.settings, row.prompts, row.point.batch
    sample, lossless = DecodeSample(batch, settings.warm_up), variant.engine.lossless
    reset_peak(model.device)
    with (
        main_stream(model.device, overlap=variant.engine.overlap),
        session_on(model, None, settings.run_config, policy=variant.policy, engine=variant.engine) as session,
    ):
        decoder = Decoder(
            session=session, ids_BT=prompts.ids_BT, mask_BT=prompts.mask_BT,
            capacity=settings.capacity(row.point.context), chunk=settings.engine.prefill_chunk,
            shared=prompts.made_up.shared(session),
            patient=False,  # record graphs at once: the warm-up has every kind of step only once
        )  # fmt: skip
        picker = GivenTokens(prompts.ids_BT, prompts.token_SB, decoder.replays.ahead)
        limit = settings.most_tokens if lossless else settings.total_steps + 1
        outcome = None if variant.acceptance is None else StatedAcceptance(variant.acceptance, settings.seed)
        loop = Loop(decoder, [()] * batch, [limit] * batch, picker)
        with closing(loop.decode_lossless(outcome) if lossless else loop.decode()) as passes:
            (_measure_lossless if lossless else _measure)(sample, row, session, passes)
        sample.selecting += _selecting(session.run)
        sample.report = RunReport.of(session.run)
    sample.peak_bytes = peak_bytes(model.device)
    return sample


def _measure(sample: DecodeSample, row: BenchRow, session: Session, passes: Iterable[NewTokens]) -> None:
    settings, whole = row.settings, 1
    if issubclass(policy_class(row.variant.policy), Triggered) and settings.slow_rate:
        whole = settings.slow_rate.denominator  # a run that stops between two slow steps would miss the stated rate
    for step, _ in enumerate(passes):
        sample.at.append(time.perf_counter())
        if step:
            sample.reads.append(_reads(session.run))
        if step == settings.warm_up:
            sample.selecting -= _selecting(session.run)
        row.on_step(sample)
        if sample.over(settings.time_limit) and sample.steps % whole == 0:
            break


def _measure_lossless(sample: DecodeSample, row: BenchRow, session: Session, passes: Iterable[NewTokens]) -> None:
    # the measurement begins and ends at a pass that verifies, so that a single request is measured in whole cycles: it
    # begins after the warm-up, and ends once the requests have the settings' number of tokens
    settings, began = row.settings, None
    for number, given in enumerate(passes):
        sample.at.append(time.perf_counter())
        sample.gave.append(sum(map(len, given.values())))
        run = session.run
        tallies = [state.tally for state in run.requests]
        # dense passes after the prompt's, and tokens kept of drafts
        counted = Counter({name: sum(getattr(tally, name) for tally in tallies) for name in DRAFTING})
        if number:
            sample.reads.append(_reads(run))
        if began is None:
            sample.warm_up = number  # the warm-up lasts until a pass that verifies
            if number >= settings.warm_up and sample.gave[-1]:
                began = counted
                sample.selecting -= _selecting(run)
        row.on_step(sample)
        if began is None or not sample.gave[-1]:
            continue
        sample.drafting = counted - began
        enough = sample.tokens >= sample.batch * settings.steps
        if enough or sample.over(settings.time_limit) or any(s.finished for s in run.requests):
            break


def needed_bytes(model: Any, variant: DecodeVariant, point: Point, settings: DecodeSettings) -> int:
    """Return the bytes that a policy's run needs besides the model, which is outside `slow_fast`."""
    with session_on(model, None, settings.run_config, policy=variant.policy, engine=variant.engine) as session:
        capacity, graphs = settings.capacity(point.context), records_steps(session)
        return session.forecast(point.batch, 1, capacity, 0, graphs=graphs).needed_bytes


def _reads(run: Run) -> list[Read]:
    # of the run's last step; a verification's rejected tokens do not count
    return [Read(state.slow, state.length, state.fast_tokens, state.packed_tokens) for state in run.requests]


def _selecting(run: Run) -> float:
    # how much a run has read to choose, in tokens per KV head, the mean over layers
    return sum(state.tally.selecting for state in run.requests)
