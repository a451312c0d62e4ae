"""A lossless run of one of our policies, with measured or stated acceptance."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from sfi_core.engine.loop import Loop, NewTokens
from sfi_core.hosts.transformers.session import Session
from sfi_core.machine.memory import peak_bytes, reset_peak
from sfi_core.measure.bench.ours import GivenTokens, decoder_of, note_report, selecting, step_read
from sfi_core.measure.bench.prompts import Prompts, Stream
from sfi_core.measure.bench.samples import DecodeSample, drafting_of
from sfi_core.measure.bench.settings import DecodeSettings, DecodeVariant, Point
from sfi_core.state.request import RequestState

STATED = (
    "lossless rows: acceptance is stated, {:g} for each tested token, and does not depend on the drafts; "
    "the tokens mean nothing"
)
MEASURED = "lossless rows: acceptance is measured on the text's prompts; our runs generate their own tokens"


@dataclass(frozen=True, slots=True)
class StatedAcceptance:
    """Keeps drafted tokens by chance: the `outcome` of a lossless run with stated acceptance.

    Attributes:
        rate: The chance that a token is kept if all before it are, in [0, 1].
        seed: The outcome of a token depends on this seed, its request and its index, not on the batch.
    """

    rate: float
    seed: int

    def __call__(self, state: RequestState, draft: Sequence[int], _: Sequence[int]) -> int:
        """Return how many tokens of a request's draft are kept; `state.step` follows the draft."""
        first = state.step - len(draft)
        kept = (self._keeps(state.request, first + place) for place in range(len(draft)))
        return sum(takewhile(bool, kept))

    def _keeps(self, request: int, index: int) -> bool:
        return random.Random(f"{self.seed} {request} {index}").random() < self.rate  # noqa: S311 - no secret


@torch.inference_mode()
def run_lossless(
    model: Any,
    variant: DecodeVariant,
    point: Point,
    settings: DecodeSettings,
    prompts: Prompts,
    stream: Stream,
    on_step: Callable[[DecodeSample], None],
) -> DecodeSample:
    """Decode losslessly under a policy; the arguments are those of `run_ours`.

    With a stated acceptance, the run decodes the stream's tokens, and chance decides which drafts are kept;
    without one, the model generates its own tokens. The measurement begins and ends at a pass that verifies,
    so that a single request is measured in whole cycles: it begins after the warm-up, and ends once the
    requests have the number of tokens asked for.

    Returns:
        The sample; its steps are passes, and a pass gives a request no token, one or several.
    """
    sample = DecodeSample(point.batch, settings.warm_up)
    reset_peak(model.device)
    with decoder_of(model, variant, point, settings, prompts, stream.config) as decoder:
        outcome, token_SB = None, None
        if variant.acceptance is not None:
            outcome = StatedAcceptance(variant.acceptance, settings.seed)
            token_SB = stream.token_SB
        loop = Loop(
            decoder, [()] * point.batch, [settings.most_tokens] * point.batch, GivenTokens(prompts.ids_BT, token_SB)
        )
        sample.began = time.perf_counter()
        with closing(loop.decode_lossless(outcome)) as passes:
            _measure(sample, decoder.session, settings, passes, on_step)
        note_report(sample, decoder.session.run)
    sample.peak_bytes = peak_bytes(model.device)
    return sample


def _measure(
    sample: DecodeSample,
    session: Session,
    settings: DecodeSettings,
    passes: Iterable[NewTokens],
    on_step: Callable[[DecodeSample], None],
) -> None:
    began: Counter[str] | None = None
    for number, given in enumerate(passes):
        sample.at.append(time.perf_counter())
        sample.gave.append(sum(map(len, given.values())))
        run = session.run
        counted = drafting_of(state.tally for state in run.requests)
        if number:
            sample.reads.append(step_read(run))
        if began is None:
            sample.warm_up = number  # the warm-up lasts until a pass that verifies
            if number >= settings.warm_up and sample.gave[-1]:
                began = counted
                sample.selecting -= selecting(run)
        on_step(sample)
        if began is None or not sample.gave[-1]:
            continue
        sample.drafting = counted - began
        enough = sample.tokens >= sample.batch * settings.steps
        if enough or sample.over(settings.time_limit) or any(s.finished for s in run.requests):
            break
    sample.selecting += selecting(session.run)


def lossless_notes(settings: DecodeSettings) -> list[str]:
    """Say whether the acceptance of lossless rows is measured or stated; [] without such rows."""
    if not settings.lossless:
        return []
    return [MEASURED if settings.acceptance is None else STATED.format(settings.acceptance)]
