"""A point's prompts: a random cache made once for all runs, or tokens that each run reads."""

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
        ids_BT: Left-padded tokens; a run reads them if `settings.prefill`.
        mask_BT: 1 for a token of the prompt, 0 for padding.
        made_up: The random cache in place of a prefill; None if the prompts are read.
    """

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    made_up: SyntheticPrompt | None

    @classmethod
    def of(cls, settings: DecodeSettings, point: Point, vocabulary: int, device: torch.device) -> "Prompts":
        """Make the prompts of a point; raise `ConfigError` if the text is shorter than a prompt."""
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
    # a window for each request, evenly apart; the first one ends at the end of the text
    room = len(text_ids) - point.context
    if room < 0:
        raise ConfigError(
            f"text must have at least a prompt's {point.context:,} tokens, got {len(text_ids):,}; lower the context"
        )
    starts = [room - row * room // max(1, point.batch - 1) for row in range(point.batch)]
    return [list(text_ids[start : start + point.context]) for start in starts]
