"""Picking the next token; transformers' own logits processors do the work."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.errors import NumericsError
from sfi_core.generation.tokens_so_far import TokensSoFar
from sfi_core.settings.sampling import Sampling
from sfi_kernels.step_descriptor import sent


def processors(sampling: Sampling) -> LogitsProcessorList:
    """Build transformers' processors, in the order `model.generate` applies them."""
    chosen = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.do_sample:
        if sampling.temperature != 1:
            chosen.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            chosen.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            chosen.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            chosen.append(MinPLogitsWarper(sampling.min_p))
    return chosen


@dataclass(slots=True)
class Row:
    """One request of a sampler.

    Attributes:
        request: Its index.
        seed: Of all requests; with the index it makes the numbers that the request draws with.
        tokens: Its tokens, with the padding of the prompts that it was read with.
        step: Its next decoding step.
    """

    request: int
    seed: int
    tokens: int
    step: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Make a generator of its own, so that no other request moves it."""
        self._random = random.Random(f"{self.seed} {self.request}")  # noqa: S311 - no secret

    def draw(self) -> float:
        """Return a number in [0, 1) that stays below 1 in any arithmetic of the sampler's."""
        return self._random.getrandbits(32) / 2**32


class Sampler:
    """Turns a step's logits into tokens.

    What a request draws depends on the seed and its index, not on what it is decoded with.

    Attributes:
        tokens: Those so far, padded prompts included; None where no processor looks at them.
        rows: The request of each row.
        ahead: Called with the tokens while they are still on the device, before the host waits for them.
    """

    def __init__(
        self,
        sampling: Sampling,
        ids_BT: torch.Tensor,
        ranks: Ranks = ALONE,
        *,
        seed: int = 0,
        first: int = 0,
        ahead: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Start with the requests from index `first` on."""
        B, T = ids_BT.shape
        self.tokens = TokensSoFar(ids_BT) if sampling.repetition_penalty != 1 else None
        self._ids_BT, self._ranks = ids_BT, ranks
        self.ahead = ahead
        self.rows = [Row(first + row, seed, T) for row in range(B)]
        self._sampling, self._seed = sampling, seed
        self._processors = processors(sampling)

    def alone(self, ids_1T: torch.Tensor, request: int) -> "Sampler":
        """Make a sampler of one more request, with the same settings."""
        return Sampler(self._sampling, ids_1T, self._ranks, seed=self._seed, first=request)

    def seat(self, row: int, other: "Sampler") -> None:
        """Let a request that was sampled alone take a row."""
        (self.rows[row],) = other.rows
        if self.tokens is not None and other.tokens is not None:
            self.tokens.seat(row, other.tokens, max(one.tokens for one in self.rows))

    def __call__(self, logits_BV: torch.Tensor, finished_B: list[bool], pad_id: int) -> list[int]:
        """Pick a token for every request; a finished one gets the padding token.

        Raises:
            NumericsError: A running request's logits hold NaN or +inf, or nothing finite.
        """
        logits_BV = logits_BV.float()
        ids_BT = self._ids_BT if self.tokens is None else self.tokens.ids_BT
        scores_BV = self._processors(ids_BT, logits_BV)
        sampled = self._sampling.do_sample
        token_B = self._draw(scores_BV, finished_B) if sampled else scores_BV.argmax(-1)
        finite_B = logits_BV.amax(-1).isfinite()
        # the one read of the device per step: the tokens, which have to be streamed, and the check with them
        picked = self._read(self._ranks.settle(token_B, finite_B))
        for row, ok, done in zip(self.rows, picked[1], finished_B, strict=True):
            if not (ok or done):
                raise NumericsError(
                    f"logits must be finite, got NaN or infinity at step {row.step} "
                    f"in request {row.request}"
                )
        tokens = [
            pad_id if done else token for token, done in zip(picked[0], finished_B, strict=True)
        ]
        if self.tokens is not None:
            self.tokens.add(sent(torch.tensor(tokens), self._ids_BT.device))
        for row in self.rows:
            row.step, row.tokens = row.step + 1, row.tokens + 1
        return tokens

    def _draw(self, scores_BV: torch.Tensor, finished_B: list[bool]) -> torch.Tensor:
        # where each request's number falls among the sums of the probabilities; broken rows fall anywhere
        safe_BV = scores_BV.nan_to_num(0.0, 0.0, -torch.inf)
        sum_BV = safe_BV.softmax(-1).nan_to_num(1.0).cumsum(-1, dtype=torch.float64)
        drawn = [
            0.0 if done else row.draw() for row, done in zip(self.rows, finished_B, strict=True)
        ]
        drawn_B = sent(torch.tensor(drawn, dtype=torch.float64), sum_BV.device)
        return torch.searchsorted(sum_BV, drawn_B[:, None] * sum_BV[:, -1:], right=True)[:, 0]

    def _read(self, picked_2B: torch.Tensor) -> list[list[int]]:
        # what `ahead` asks of the device comes after the copy, so that the wait is not for it
        host, done = picked_2B, None
        if picked_2B.is_cuda:
            host = torch.empty(picked_2B.shape, dtype=picked_2B.dtype, pin_memory=True)
            host.copy_(picked_2B, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(picked_2B.device))
        if self.ahead is not None:
            self.ahead(picked_2B[0])
        if done is not None:
            done.synchronize()
        read: list[list[int]] = host.tolist()
        return read
