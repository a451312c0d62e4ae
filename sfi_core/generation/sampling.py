"""Picks tokens by our settings: scores by transformers' processors, samples by index-keyed noise."""

from collections.abc import Callable, Sequence

import torch
from transformers.generation import logits_process

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.engine.picking import Picker, TokensSoFar
from sfi_core.settings.engine import Sampling
from sfi_kernels.step_descriptor import sent

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
    """A picker with transformers' processors: none of them depends on the order of a request's tokens."""

    def __init__(
        self, sampling: Sampling | Sequence[Sampling], ids_BT: torch.Tensor, ranks: Ranks = ALONE, *,
        seed: int | Sequence[int] = 0, first: int = 0, ahead: Callable[[torch.Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        """Start with the requests from index `first` on; one sampling and one seed for all requests, or one for each.

        A seed of a request's own gives it the tokens that it would have alone; one seed for all draws from its index.
        """
        super().__init__(range(first, first + len(ids_BT)), ranks, seed=None, ahead=ahead)
        self._sampling, self._seeds, self._ids_BT = sampling, seed, ids_BT
        for row in self.rows:
            if self._of(row.request).do_sample:
                row.noise = (seed, row.request) if isinstance(seed, int) else (seed[row.request], 0)
        samplings = [sampling] if isinstance(sampling, Sampling) else sampling
        penalty = any(sampling.repetition_penalty != 1 for sampling in samplings)
        self.tokens, self.looks_back = TokensSoFar(ids_BT) if penalty else None, penalty
        self._processors = {sampling: processors(sampling) for sampling in samplings}
        lowest = min((sampling.divisor for sampling in samplings if sampling.do_sample), default=1.0)
        if lowest < LOW:
            self.hint = f"; raise sampling.temperature, {lowest:g} leaves the range of float32"

    def _of(self, request: int) -> Sampling:
        return self._sampling if isinstance(self._sampling, Sampling) else self._sampling[request]

    def alone(self, ids_1T: torch.Tensor, request: int) -> "Sampler":
        """See `Picker`."""
        return Sampler(self._sampling, ids_1T, self._ranks, seed=self._seeds, first=request)

    def widest(self, vocabulary: int) -> int:
        """See `Picker`."""
        return vocabulary if self.tokens is None else max(vocabulary, *self.tokens.length_B)

    def scores(self, logits_PV: torch.Tensor, row_P: Sequence[int], tail: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `Picker`."""
        ids_PT = self._ids_BT if self.tokens is None else self.tokens.before(row_P, tail)
        if len(self._processors) == 1:
            (chosen,) = self._processors.values()
            scores_PV: torch.Tensor = chosen(ids_PT, logits_PV)
            return scores_PV
        scores_PV = torch.empty_like(logits_PV)
        for sampling, chosen in self._processors.items():
            places = [place for place, row in enumerate(row_P) if self._of(self.rows[row].request) == sampling]
            at = sent(torch.tensor(places, dtype=torch.long), logits_PV.device)
            scores_PV[at] = chosen(ids_PT if self.tokens is None else ids_PT[at], logits_PV[at])
        return scores_PV
