"""A run of one of our policies, decoded as by `sfi_core.generate`, with given tokens."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from sfi_core.engine.loop import Loop
from sfi_core.engine.maintenance import main_stream
from sfi_core.engine.report import RunReport
from sfi_core.engine.run import Run
from sfi_core.generation.sampling import Sampler
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.slow_fast import slow_fast
from sfi_core.machine.memory import peak_bytes, reset_peak
from sfi_core.measure.bench.prompts import Prompts, Stream
from sfi_core.measure.bench.samples import DecodeSample, StepRead
from sfi_core.measure.bench.settings import DecodeSettings, DecodeVariant, Point
from sfi_core.policies import policy_class
from sfi_core.policies.base import Triggered
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.sampling import Sampling
from sfi_kernels.step_descriptor import sent


class GivenTokens(Sampler):
    """Picks given tokens, in drafts and verifications too, by making their logits the largest.

    The device does it: the next step may start before the host has read the token.
    """

    def __init__(
        self,
        ids_BT: torch.Tensor,
        token_SB: Sequence[Sequence[int]] | None,
        ahead: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Take the prompts, and the tokens by step and request; None picks the model's own."""
        super().__init__(Sampling(), ids_BT, ahead=ahead)
        self._token_SB = None
        if token_SB is not None:
            self._token_SB = torch.tensor(token_SB, device=ids_BT.device)

    def __call__(self, logits_BV: torch.Tensor, finished_B: list[bool], pad_id: int) -> list[int]:
        """Pick the next token of every request; all have the same number of tokens before it."""
        if self._token_SB is not None:
            self._raise(logits_BV, self._token_SB[self.rows[0].step])
        return super().__call__(logits_BV, finished_B, pad_id)

    def pick(
        self, logits_XV: torch.Tensor, row_X: Sequence[int], offset_X: Sequence[int], tail: Sequence[Sequence[int]]
    ) -> list[int]:
        """See `Sampler.pick`."""
        if self._token_SB is not None:
            pairs = zip(row_X, offset_X, strict=True)
            steps = [self.rows[row].step + offset for row, offset in pairs]
            at_2X = sent(torch.tensor([steps, list(row_X)]), logits_XV.device)
            self._raise(logits_XV, self._token_SB[at_2X[0], at_2X[1]])
        return super().pick(logits_XV, row_X, offset_X, tail)

    @staticmethod
    def _raise(logits_XV: torch.Tensor, token_X: torch.Tensor) -> None:
        logits_XV.scatter_(1, token_X[:, None], torch.finfo(logits_XV.dtype).max)


@torch.inference_mode()
def run_ours(
    model: Any,
    variant: DecodeVariant,
    point: Point,
    settings: DecodeSettings,
    prompts: Prompts,
    stream: Stream,
    on_step: Callable[[DecodeSample], None],
) -> DecodeSample:
    """Decode under a policy; the logits of the stream's tokens are made the largest, so they are picked.

    The model is outside `slow_fast`; `on_step` is called with the sample after every step.
    """
    sample = DecodeSample(point.batch, settings.warm_up)
    whole = _period(variant, settings)
    reset_peak(model.device)
    with decoder_of(model, variant, point, settings, prompts, stream.config) as decoder:
        session = decoder.session
        token_SB = None if settings.real_prompts else stream.token_SB
        loop = Loop(
            decoder, [()] * point.batch, [settings.total_steps + 1] * point.batch,
            GivenTokens(prompts.ids_BT, token_SB, decoder.ahead),
        )  # fmt: skip
        sample.began = time.perf_counter()
        with closing(loop.decode()) as passes:
            for step, _ in enumerate(passes):
                sample.at.append(time.perf_counter())
                run = session.run
                if step:
                    sample.reads.append(step_read(run))
                if step == settings.warm_up:
                    sample.selecting -= selecting(run)
                on_step(sample)
                if sample.over(settings.time_limit) and sample.steps % whole == 0:
                    break
        sample.selecting += selecting(session.run)
        note_report(sample, session.run)
    sample.peak_bytes = peak_bytes(model.device)
    return sample


@contextmanager
def decoder_of(
    model: Any, variant: DecodeVariant, point: Point, settings: DecodeSettings, prompts: Prompts, config: SfiConfig
) -> Iterator[Decoder]:
    """Put a model under a policy, and yield a decoder of a point's prompts."""
    with (
        main_stream(model.device, overlap=variant.engine.overlap),
        slow_fast(model, None, config, policy=variant.policy, engine=variant.engine) as session,
    ):
        yield Decoder(
            session=session, ids_BT=prompts.ids_BT, mask_BT=prompts.mask_BT,
            capacity=settings.capacity(point.context), chunk=settings.engine.prefill_chunk,
            shared=None if prompts.made_up is None else prompts.made_up.shared(session),
            patient=False,  # record graphs at once: the warm-up has every kind of step only once
        )  # fmt: skip


def note_report(sample: DecodeSample, run: Run) -> None:
    """Copy the run's tiers and paths into the sample."""
    report = RunReport.of(run)
    sample.tiers, sample.paths = report.kv_tiers, report.paths
    sample.not_replayed = report.not_replayed


def _period(variant: DecodeVariant, settings: DecodeSettings) -> int:
    # steps between two slow steps: a run that stops within them would miss the stated slow rate
    triggered = issubclass(policy_class(variant.policy), Triggered)
    return settings.slow_rate.denominator if triggered and settings.slow_rate else 1


def step_read(run: Run) -> StepRead:
    """Return what the run's last step read; a verification's rejected tokens do not count."""
    states = run.requests
    return StepRead(
        tuple(state.slow for state in states),
        tuple(state.length for state in states),
        tuple(state.fast_tokens for state in states),
        tuple(state.packed_tokens for state in states),
    )


def selecting(run: Run) -> float:
    """Return how much a run has read to select, in tokens of a layer's keys and values."""
    return sum(state.tally.selecting for state in run.requests)
