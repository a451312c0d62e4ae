"""Picks tokens by our settings: scores by transformers' processors, samples by index-keyed noise."""

from collections.abc import Callable, Sequence

import torch
from transformers.generation import logits_process

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.engine.picking.picker import Picker
from sfi_core.engine.picking.tokens_so_far import TokensSoFar
from sfi_core.settings.sampling import Sampling

LOW = 1e-30  # logits divided by such a temperature may leave float32's range


def processors(sampling: Sampling) -> logits_process.LogitsProcessorList:
    """Build the processors in the order of `model.generate`."""
    chosen = logits_process.LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        chosen.append(logits_process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.do_sample:
        if sampling.divisor != 1:
            chosen.append(logits_process.TemperatureLogitsWarper(sampling.divisor))
        if sampling.top_k:
            chosen.append(logits_process.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            chosen.append(logits_process.TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            chosen.append(logits_process.MinPLogitsWarper(sampling.min_p))
    return chosen


class Sampler(Picker):
    """A picker with transformers' processors, which depend on the set of a request's tokens at most.

    `tokens` are those so far, padded prompts included; None if no processor needs them.
    """

    def __init__(
        self, sampling: Sampling, ids_BT: torch.Tensor, ranks: Ranks = ALONE, *, seed: int = 0, first: int = 0,
        ahead: Callable[[torch.Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        """Start with the requests from index `first` on."""
        requests = range(first, first + len(ids_BT))
        super().__init__(requests, ranks, seed=seed if sampling.do_sample else None, ahead=ahead)
        self.tokens = TokensSoFar(ids_BT) if sampling.repetition_penalty != 1 else None
        self._ids_BT, self._sampling = ids_BT, sampling
        self._processors = processors(sampling)
        if 0 < sampling.divisor < LOW:
            self.hint = f"; raise sampling.temperature, {sampling.divisor:g} leaves the range of float32"

    def alone(self, ids_1T: torch.Tensor, request: int) -> "Sampler":
        """See `Picker`."""
        return Sampler(self._sampling, ids_1T, self._ranks, seed=self._seed or 0, first=request)

    def seat(self, row: int, other: "Sampler") -> None:
        """See `Picker`."""
        super().seat(row, other)
        if self.tokens is not None and other.tokens is not None:
            self.tokens.seat(row, other.tokens)

    def note(self, tokens: Sequence[Sequence[int]]) -> None:
        """See `Picker`."""
        if self.tokens is not None:
            self.tokens.add(tokens)

    def widest(self, vocabulary: int) -> int:
        """See `Picker`."""
        return vocabulary if self.tokens is None else max(vocabulary, *self.tokens.length_B)

    def scores(self, logits_PV: torch.Tensor, row_P: Sequence[int], tail: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `Picker`."""
        ids_PT = self._ids_BT if self.tokens is None else self.tokens.before(row_P, tail)
        scores_PV: torch.Tensor = self._processors(ids_PT, logits_PV)
        return scores_PV
