"""What a sampler has picked, on its way from the device to the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

TOKEN, FINE, PROBABILITY = range(3)  # rows of what is told; a probability is the bits of a float64


@dataclass(frozen=True, slots=True)
class Picked:
    """The tokens of a pass's positions.

    Attributes:
        token_X: Their ids.
        probability_X: What each token has in its position's distribution, after all processors.
    """

    token_X: list[int]
    probability_X: list[float]


def read(
    told_RX: torch.Tensor, ahead: Callable[[torch.Tensor], None] | None = None
) -> tuple[list[int], list[int], list[float]]:
    """Copy tokens, checks and, where `told_RX` has that row, probabilities to the host, in one copy.

    Args:
        told_RX: TOKEN, FINE and PROBABILITY, or the first two alone; int64.
        ahead: Called with the tokens on the device before the host waits for the copy.
    """
    # what `ahead` asks of the device comes after the copy, so that the wait is not for it
    host, done = told_RX, None
    if told_RX.is_cuda:
        host = torch.empty(told_RX.shape, dtype=told_RX.dtype, pin_memory=True)
        host.copy_(told_RX, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(told_RX.device))
    if ahead is not None:
        ahead(told_RX[TOKEN])
    if done is not None:
        done.synchronize()
    probability_X: list[float] = host[PROBABILITY:].view(torch.float64).flatten().tolist()
    token_X: list[int] = host[TOKEN].tolist()
    fine_X: list[int] = host[FINE].tolist()
    return token_X, fine_X, probability_X
