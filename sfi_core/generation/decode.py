"""Algorithm 1: the slow-fast decoding loop over a batch of requests."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

import torch


class Model(Protocol):
    """A model under SFI, with a prompt of its own."""

    def prefill(self) -> torch.Tensor:
        """Read the prompt, step 0, which is slow (g_0 = 1); return the next token's logits, [B, V]."""

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode x_{t-1} under the policy's plan: dense and refresh, or fast; return logits, [B, V]."""

    def record(self, token_B: list[int]) -> None:
        """Note the tokens x_t."""

    def admit(self, token_B: list[int]) -> list[int]:
        """Let requests that wait begin where others ended; return the tokens with theirs, none at the end."""


def decode(
    model: Model,
    sample: Callable[[torch.Tensor], list[int]],
    max_new_tokens: int | None = None,
) -> Iterator[list[int]]:
    """Yield the tokens of each step, alternating fast and slow steps (Algorithm 1).

    Args:
        model: Plans each step (Eq. 5, T_max) and attends accordingly.
        sample: Picks a token for every request from logits `[B, V]`.
        max_new_tokens: Upper bound on the steps; None goes on until every request is done.
    """
    logits_BV = model.prefill()
    for step in count(1):
        token_B = sample(logits_BV)
        model.record(token_B)
        yield token_B
        if step == max_new_tokens or not (token_B := model.admit(token_B)):
            return
        logits_BV = model.step(token_B)
