"""A point's prompts: made up once for all runs that can share the cache, or read by each run."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sfi_core.errors import ConfigError
from sfi_core.generation.synthetic import SyntheticPrompt
from sfi_core.measure.bench.settings import DecodeSettings, Point


@dataclass(slots=True)
class Prompts:
    """The prompts of a point.

    Attributes:
        ids_BT: Left-padded tokens; read only where the settings ask for a prefill.
        mask_BT: 1 for a token of the prompt, 0 for padding.
        made_up: The cache that stands for a prefill; None where the prompts are read.
    """

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    made_up: SyntheticPrompt | None

    @classmethod
    def of(
        cls, settings: DecodeSettings, point: Point, vocabulary: int, device: torch.device
    ) -> "Prompts":
        """Make the prompts of a point; the first run fills the cache of made-up prompts.

        Raises:
            ConfigError: Prompts are a text's, and it is shorter than a prompt.
        """
        generator = torch.Generator(device).manual_seed(settings.seed)
        shape = (point.batch, point.context)
        ids_BT = torch.randint(1, vocabulary, shape, generator=generator, device=device)
        if settings.real_prompts:
            ids_BT = torch.tensor(_windows(settings.text_ids or (), point), device=device)
        lengths_B = torch.tensor(point.contexts, device=device)
        place_T = torch.arange(point.context, device=device)
        mask_BT = (place_T >= point.context - lengths_B[:, None]).long()
        made_up = None
        if not settings.prefill:
            capacity = settings.capacity(point.context)
            made_up = SyntheticPrompt(point.contexts, capacity, seed=settings.seed)
        return cls(ids_BT, mask_BT, made_up)


def _windows(text_ids: Sequence[int], point: Point) -> list[list[int]]:
    # evenly apart, one for each request; the first ends where the text ends
    room = len(text_ids) - point.context
    if room < 0:
        raise ConfigError(
            f"text must have a token for each of a prompt's {point.context:,}, got {len(text_ids):,}; lower "
            "the context"
        )
    starts = [room - row * room // max(1, point.batch - 1) for row in range(point.batch)]
    return [list(text_ids[start : start + point.context]) for start in starts]
