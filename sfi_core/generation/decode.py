"""The slow-fast decoding loop over a batch of requests, Algorithm 1."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

import torch


class Model(Protocol):
    """A model under SFI with its prompts."""

    def prefill(self) -> torch.Tensor:
        """Read the prompts: step 0, which is slow (g_0 = 1). Return the next tokens' logits, [B, V]."""

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode x_{t-1} in a slow or a fast step, as the policy plans; return logits, [B, V]."""

    def record(self, token_B: list[int]) -> None:
        """Note the tokens x_t."""

    def admit(self, token_B: list[int]) -> list[int]:
        """Begin waiting requests in free rows; return all rows' tokens, [] once all requests have ended."""


def decode(
    model: Model,
    sample: Callable[[torch.Tensor], list[int]],
    max_new_tokens: int | None = None,
) -> Iterator[list[int]]:
    """Yield the tokens of each step, alternating fast and slow steps (Algorithm 1).

    Args:
        model: Plans each step (Eq. 5, T_max) and runs it.
        sample: Picks a token for every row from logits `[B, V]`.
        max_new_tokens: The most steps; None goes on until every request has ended.
    """
    logits_BV = model.prefill()
    for step in count(1):
        token_B = sample(logits_BV)
        model.record(token_B)
        yield token_B
        if step == max_new_tokens or not (token_B := model.admit(token_B)):
            return
        logits_BV = model.step(token_B)
