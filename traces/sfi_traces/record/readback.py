"""Copies tensors to the host without blocking the device or the decoding thread."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch


class Readback:
    """Copies of some tensors on the host, of `nbytes` in all.

    CUDA tensors are joined by type and copied to pinned memory asynchronously; the caller must not write to
    others before `wait`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        self._tensors = list(tensors)
        self._copies: list[tuple[list[int], torch.Tensor]] = []
        self._events: list[torch.cuda.Event] = []
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            if tensor.is_cuda:
                groups[tensor.device, tensor.dtype].append(place)
        for places in groups.values():
            self._copies.append((places, _pinned([tensors[place] for place in places])))
        for device in {device for device, _ in groups}:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def wait(self) -> list[npt.NDArray[Any]]:
        """Return the tensors' values in order, once they are on the host; floats as float32."""
        for event in self._events:
            event.synchronize()
        for places, flat in self._copies:
            pieces = torch.split(flat, [self._tensors[place].numel() for place in places])
            for place, piece in zip(places, pieces, strict=True):
                self._tensors[place] = piece.view(self._tensors[place].shape)
        return [(tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy() for tensor in self._tensors]


def _pinned(tensors: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    return host.copy_(flat, non_blocking=True)
