"""Algorithm 1: the slow-fast decoding loop over a batch of requests."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch


class Model(Protocol):
    """A model under SFI, with a prompt of its own."""

    def prefill(self) -> torch.Tensor:
        """Read the prompt, step 0, which is slow (g_0 = 1); return the next token's logits, [B, V]."""

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode x_{t-1} under the policy's plan: dense and refresh, or fast; return logits, [B, V]."""

    def record(self, token_B: list[int]) -> bool:
        """Note the tokens x_t; return whether every request is done."""


def decode(
    model: Model, sample: Callable[[torch.Tensor], list[int]], max_new_tokens: int
) -> Iterator[list[int]]:
    """Yield the tokens of each step, alternating fast and slow steps (Algorithm 1).

    Args:
        model: Plans each step (Eq. 5, T_max) and attends accordingly.
        sample: Picks a token for every request from logits `[B, V]`.
        max_new_tokens: Upper bound on the steps.
    """
    token_B: list[int] = []
    for step in range(max_new_tokens):
        logits_BV = model.step(token_B) if step else model.prefill()
        token_B = sample(logits_BV)
        done = model.record(token_B)
        yield token_B
        if done:
            return
