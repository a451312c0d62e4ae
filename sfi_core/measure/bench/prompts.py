"""What a benchmark decodes: a point's prompts, and the tokens after them.

Prompts are a random cache made once for all runs. The tokens after them are given, because tokens of random weights
mean nothing.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from sfi_core.generation.synthetic import SyntheticPrompt
from sfi_core.measure.bench.samples import DecodeSample
from sfi_core.measure.bench.settings import DecodeSettings, DecodeVariant, Point
from sfi_core.settings.config import SfiConfig
from sfi_core.sizes.step import ByteModel

TRIGGER = 0  # the token id that makes a step slow under a stated rate


@dataclass(slots=True)
class Prompts:
    """The prompts of a point."""

    ids_BT: torch.Tensor  # left-padded tokens, of which a run reads the last one
    mask_BT: torch.Tensor  # 1 for a token of the prompt, 0 for padding
    made_up: SyntheticPrompt  # the random cache in place of a prefill

    @classmethod
    def of(cls, settings: DecodeSettings, point: Point, vocabulary: int, device: torch.device) -> "Prompts":
        """Make the prompts of a point."""
        generator = torch.Generator(device).manual_seed(settings.seed)
        shape = (point.batch, point.context)
        ids_BT = torch.randint(1, vocabulary, shape, generator=generator, device=device)
        lengths_B = torch.tensor(point.contexts, device=device)
        place_T = torch.arange(point.context, device=device)
        mask_BT = (place_T >= point.context - lengths_B[:, None]).long()
        made_up = SyntheticPrompt(point.contexts, settings.capacity(point.context), seed=settings.seed)
        return cls(ids_BT, mask_BT, made_up)


@dataclass(frozen=True, slots=True)
class Stream:
    """The tokens of a batch."""

    config: SfiConfig  # the settings under which these tokens decide the slow steps
    token_SB: list[list[int]]  # token x_t of each request by step, from step 0 to the last


def slow_steps(rate: Fraction, row: int, batch: int, first: int, last: int) -> list[int]:
    """Return the slow steps of a request in `range(first, last)`; 0 is the first measured step.

    Slow steps are evenly apart, and staggered over the requests: at a rate of 1/n, request r is slow at step
    r n / batch and at every n-th step from there.
    """
    if rate == 0:
        return []
    offset = math.floor(row / (rate * batch))
    return [
        step for step in range(first, last) if math.ceil((step - offset + 1) * rate) > math.ceil((step - offset) * rate)
    ]


def stream(settings: DecodeSettings, batch: int, vocabulary: int) -> Stream:
    """Make the tokens of `batch` requests, slow at the settings' rate."""
    rate = settings.slow_rate
    delay, most, warm_up = settings.config.trigger_delay, settings.most_tokens, settings.warm_up
    config = settings.config.replace(
        trigger_policy="boundary", trigger_token_ids=(TRIGGER,), slow_start=1, min_gap=0, t_max=most
    )
    rows = []
    for row in range(batch):
        rng = random.Random(f"{settings.seed} {row}")  # noqa: S311 - no secret
        tokens = [rng.randrange(TRIGGER + 1, vocabulary) for _ in range(most)]
        last = most - 1 - warm_up
        slow = [1 + warm_up + step for step in slow_steps(rate, row, batch, 0, last)]
        if rate > 0:  # the warm-up has every kind of step: all slow, one slow, all fast
            slow += [1 + delay, *([2 + delay] if row == 0 else [])][: max(0, warm_up - delay)]
        for step in slow:
            tokens[step - 1 - delay] = TRIGGER
        rows.append(tokens)
    return Stream(config, [list(step) for step in zip(*rows, strict=True)])


@dataclass(slots=True)
class BenchRow:
    """A row of the benchmark: a variant at a point, what its runs decode and need, and what they took."""

    model: Any  # the model, outside `slow_fast`
    variant: DecodeVariant
    point: Point
    settings: DecodeSettings
    prompts: Prompts
    stream: Stream  # the tokens that our policies decode
    bytes_read: ByteModel  # the bytes of the variant's steps
    needed_bytes: int = 0  # memory that a run needs besides the model
    on_step: Callable[[DecodeSample], None] = lambda _: None  # called with the sample after every step
    samples: list[DecodeSample] = field(default_factory=list)  # one of each repeat
