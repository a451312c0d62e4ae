"""What a sampler has picked, on its way from the device to the host."""

from collections.abc import Callable

import torch

TOKEN, FINE = range(2)  # rows of what is told


def read(
    told_2X: torch.Tensor, ahead: Callable[[torch.Tensor], None] | None = None
) -> tuple[list[int], list[int]]:
    """Copy tokens and checks to the host, in one copy.

    Args:
        told_2X: TOKEN and FINE, int64.
        ahead: Called with the tokens on the device before the host waits for the copy.
    """
    # what `ahead` asks of the device comes after the copy, so that the wait is not for it
    host, done = told_2X, None
    if told_2X.is_cuda:
        host = torch.empty(told_2X.shape, dtype=told_2X.dtype, pin_memory=True)
        host.copy_(told_2X, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(told_2X.device))
    if ahead is not None:
        ahead(told_2X[TOKEN])
    if done is not None:
        done.synchronize()
    token_X, fine_X = host.tolist()
    return token_X, fine_X
