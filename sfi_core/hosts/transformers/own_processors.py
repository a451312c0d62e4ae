"""Pick tokens as `model.generate` does, but each position of a pass on its own."""

from collections.abc import Sequence

import torch
from transformers.generation import logits_process

from sfi_core.distributed.ranks import Ranks
from sfi_core.engine.picking.picker import Picker
from sfi_core.engine.picking.tokens_so_far import TokensSoFar
from sfi_core.errors import ConfigError
from sfi_kernels.step_descriptor import sent

# they know which row of the batch a text is
BY_ROW = (
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
)


class OwnProcessors(Picker):
    """A picker with transformers' processors, which see each position's row as in `model.generate`.

    A row's tokens are the padded prompt and what follows, so that processors that count tokens count right. A
    processor must be a function of tokens and scores: it is called for drafted tokens too. `tokens` has each
    row's so far.
    """

    own_scores = False

    def __init__(
        self,
        chosen: logits_process.LogitsProcessorList,
        ids_RT: torch.Tensor,
        requests: Sequence[int],
        ranks: Ranks,
        seed: int | None,
    ) -> None:
        """Start with the first token of some requests; raise `ConfigError` for a processor with a state.

        `ids_RT` are the padded prompts of all requests, `requests` those with a row; `seed` is that of the
        draws, None for the best token.
        """
        super().__init__(requests, ranks, seed=seed)
        for one in chosen:
            if isinstance(one, logits_process.SynthIDTextWatermarkLogitsProcessor):
                raise ConfigError(f"logits_processor must be stateless in a lossless run, got {type(one).__name__}")
        self._chosen, self._ids_RT = chosen, ids_RT
        self.tokens = TokensSoFar(ids_RT[list(requests)])
        self._by_row = any(_knows_rows(one) for one in chosen)

    def alone(self, ids_1T: torch.Tensor, request: int) -> "OwnProcessors":
        """See `Picker`; the request's prompt keeps its padding."""
        del ids_1T
        return OwnProcessors(self._chosen, self._ids_RT, [request], self._ranks, self._seed)

    def seat(self, row: int, other: "OwnProcessors") -> None:
        """See `Picker`."""
        super().seat(row, other)
        self.tokens.seat(row, other.tokens)

    def note(self, tokens: Sequence[Sequence[int]]) -> None:
        """See `Picker`."""
        self.tokens.add(tokens)

    def scores(self, logits_PV: torch.Tensor, row_P: Sequence[int], tail: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `Picker`."""
        if not self._chosen:
            return logits_PV
        pairs = zip(row_P, tail, strict=True)
        return torch.cat([self._score(logits_PV[p : p + 1], row, after) for p, (row, after) in enumerate(pairs)])

    def _score(self, logits_1V: torch.Tensor, row: int, tail: Sequence[int]) -> torch.Tensor:
        ids_1T = self.tokens.ids_BT[row : row + 1, : self.tokens.length_B[row]]
        if tail:
            ids_1T = torch.cat([ids_1T, sent(torch.tensor([list(tail)]), ids_1T.device)], 1)
        places, place = (len(self._ids_RT), self.rows[row].request) if self._by_row else (1, 0)
        # copies: a processor may write into what it gets
        scores_RV: torch.Tensor = self._chosen(ids_1T.repeat(places, 1), logits_1V.repeat(places, 1))
        return scores_RV[place : place + 1]


def _knows_rows(one: logits_process.LogitsProcessor) -> bool:
    if isinstance(one, logits_process.RepetitionPenaltyLogitsProcessor):
        # newer transformers leave out each row's own padding
        return isinstance(one.prompt_ignore_length, torch.Tensor)
    # any that is not transformers' own may
    return isinstance(one, BY_ROW) or type(one).__module__ != logits_process.__name__
