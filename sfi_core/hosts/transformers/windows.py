"""The sliding windows of one request in buffers that compiled steps append to, beside transformers' own layers."""

from dataclasses import dataclass
from typing import Any

import torch

from sfi_core.hosts.transformers.cache import SfiCache
from sfi_kernels.tables import Layer

SPARE = 512  # tokens that are appended until the window moves to the front


@dataclass(slots=True)
class _Window:
    # rows [H, R, D] of keys and values, of which the first has the position `start`; `known` is what they were copied
    # from, and `norm` room for norms that nobody reads
    key_HRD: torch.Tensor
    value_HRD: torch.Tensor
    norm_X: torch.Tensor
    known: torch.Tensor
    start: int


class Windows:
    """The sliding-window layers of a cache; `layers` are their numbers."""

    def __init__(self, cache: SfiCache) -> None:
        """Find the layers; nothing is copied yet."""
        self._layers = {n: layer for n, layer in enumerate(cache.layers) if getattr(layer, "is_sliding", False)}
        self.layers = list(self._layers)
        self._windows: dict[int, _Window] = {}
        self._length = 0

    def locate(self, table_LX: Any, length: int) -> None:
        """Write where the layers' rows are for a step that appends the last of `length` tokens."""
        for index, layer in self._layers.items():
            window, size = self._windows.get(index), layer.sliding_window
            if window is None or window.known is not layer.keys:
                window = self._windows[index] = _copied(layer.keys, layer.values, length - 1, size)
            elif length - window.start > window.key_HRD.shape[1]:
                first = length - size - window.start  # of the tokens that the next queries see
                for rows in (window.key_HRD, window.value_HRD):
                    rows[:, : size - 1] = rows[:, first : first + size - 1].clone()
                window.start += first
            where = [Layer.KEYS, Layer.VALUES, Layer.NORMS]
            table_LX[index, where] = [x.data_ptr() for x in (window.key_HRD, window.value_HRD, window.norm_X)]
            sizes = size, window.key_HRD.shape[1], window.start
            table_LX[index, [Layer.WINDOW, Layer.WINDOW_ROOM, Layer.WINDOW_START]] = sizes
        self._length = length

    def leave(self) -> None:
        """Give the layers their tokens back, for a step module by module."""
        for index, window in self._windows.items():
            layer, end = self._layers[index], self._length - window.start
            first = max(0, end - layer.sliding_window + 1)
            if layer.keys is window.known:
                layer.keys = window.key_HRD[None, :, first:end].clone()
                layer.values = window.value_HRD[None, :, first:end].clone()
                layer.cumulative_length = self._length
        self._windows.clear()


def _copied(key_1HTD: torch.Tensor, value_1HTD: torch.Tensor, length: int, size: int) -> _Window:
    (_, H, T, D), room = key_1HTD.shape, size + SPARE
    rows = key_1HTD.new_empty(2, H, room, D)
    rows[0, :, :T], rows[1, :, :T] = key_1HTD[0], value_1HTD[0]
    return _Window(rows[0], rows[1], torch.empty(H * room), key_1HTD, length - T)
