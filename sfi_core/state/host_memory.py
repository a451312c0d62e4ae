"""Host memory for a cache's pages, pinned where a GPU reads it over the link."""

import math

import torch

from sfi_core.errors import MemoryForecastError


class HostMemory:
    """Memory for `planned` bytes or more, in few pieces: PyTorch rounds a piece of pinned memory up to a power of 2."""

    def __init__(self, planned: int) -> None:
        self._planned, self._piece = planned, torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        """Return an uninitialized tensor; raise `MemoryForecastError` if the system pins no memory for it."""
        if not pinned:
            return torch.empty(shape, dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        if len(self._piece) < size:
            whole = max(size, 1 << max(0, self._planned.bit_length() - 1))
            try:
                self._piece = torch.empty(whole, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                raise MemoryForecastError(
                    f"host memory must be pinned under kv_device_budget, but the system refuses {whole} bytes; lower "
                    "the batch or max_new_tokens"
                ) from error
        taken, self._piece = self._piece[:size], self._piece[size:]
        self._planned = max(0, self._planned - size)
        return taken.view(dtype).view(shape)
