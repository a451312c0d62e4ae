"""Cache layers of sliding windows and of chunks: transformers' own while prompts are read, then rings of pages.

A layer's tokens are in one of two places: in transformers' tensors, padded on the left, which prompts, prompt caches
and compiled steps use; or in its ring, for steps that run module by module or as CUDA graphs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from sfi_core.engine.run import Run
from sfi_core.engine.windows import Window, attend_window
from sfi_core.state.window_ring import WindowRing, ring_rows
from sfi_kernels.tables import Layer

SPARE = 512  # tokens that compiled steps append to a window until it moves to the front of its buffer


class WindowLayer(DynamicSlidingWindowLayer):
    """A layer whose decoding steps attend in a ring; `keys` and `values` are None where its tokens are there."""

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, index: int, window: int, *, chunked: bool) -> None:
        """Begin without tokens; `chunked` attention sees a token's own chunk of `window` tokens."""
        super().__init__(window)
        self.index, self.window = index, Window(window, chunked)
        self.run: Run | None = None
        self.ring: WindowRing | None = None
        self.pending = False

    @property
    def attends(self) -> bool:
        """Whether the ring attends in the pass under way, a decoding one, and not transformers."""
        return isinstance(self.run, Run) and self.run.batch_pass.decodes  # a probe has no run

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as transformers where prompts are read; else return the new tokens, which `attend` stores."""
        run = self.run
        if run is None or not self.attends:
            if isinstance(run, Run):
                self.leave(run.batch_pass.start)
            whole: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return whole
        run.store.grow(run.batch_pass.longest)
        self.enter(run, run.batch_pass.start, key_states.shape[2])
        self.cumulative_length += key_states.shape[2]
        self.pending = True
        return key_states, value_states

    def attend(
        self, index: int, query_BHGTD: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Attend in a decoding pass for layer `index`, this one or one that reads its keys; see `attend_window`."""
        assert self.run is not None, "`update` has seen it"
        assert self.ring is not None, "`update` has put the tokens there"
        new = (key, value) if index == self.index else None
        self.pending = self.pending and new is None
        return attend_window(self.run, self.ring, self.window, query_BHGTD, new, **options)

    def enter(self, run: Run, lengths: Sequence[int], tokens: int = 1) -> None:
        """Put the tokens of requests of so many into a ring with room for the `tokens` of a pass."""
        drafts = run.policy.config.draft.max_tokens * run.engine.lossless
        rows = ring_rows(self.window.size, max(1 + drafts, tokens), run.store.capacity)
        if self.ring is not None and self.ring.rows < rows:
            self.leave(lengths)
        key, value = self.keys, self.values
        if key is None or value is None:
            return
        if self.ring is None or self.ring.rows < rows:
            self.ring = WindowRing(key, value, rows, run.store.backend)
        held = min(key.shape[2], self.ring.rows)
        self.ring.fill(key, value, lengths, [min(length, held) for length in lengths])
        self.keys = self.values = None

    def leave(self, lengths: Sequence[int]) -> None:
        """Give transformers its tensors back, for requests of so many tokens."""
        if self.keys is None and self.ring is not None:
            held = min(self.sliding_window - 1, self.cumulative_length, self.ring.rows)
            self.keys, self.values = self.ring.tokens(lengths, held)

    def seat(self, run: Run, row: int, other: Any, width: int) -> None:
        """Give a row to a request that was read alone; the longest now has `width` tokens."""
        lengths = [state.length for state in run.requests]
        self.enter(run, lengths)
        assert self.ring is not None, "it has been made"
        key, value = (tensor.expand(len(lengths), -1, -1, -1) for tensor in (other.keys, other.values))
        counts = [0] * len(lengths)
        counts[row] = min(lengths[row], key.shape[2])
        self.ring.fill(key, value, lengths, counts)
        self.cumulative_length = width


class WindowStateLayer(WindowLayer, LinearAttentionLayer):
    """A layer that attends to a window and has states as well, which stay transformers' own."""

    def __init__(self, index: int, window: int, number_of_states: int) -> None:
        WindowLayer.__init__(self, index, window, chunked=False)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Begin with keys and values, or with a state: transformers names the states' arguments only."""
        (WindowLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


class _Window:
    # rows [H, R, D] of keys and values, the first at position `start`, copied from `known`; `norm_X` is read by nobody
    def __init__(self, layer: Any, length: int) -> None:
        (_, H, T, D), room = layer.keys.shape, layer.sliding_window + SPARE
        self.known, self.start, self.norm_X = layer.keys, length - T, torch.empty(H * room)
        self.rows_KHRD = layer.keys.new_empty(2, H, room, D)
        self.rows_KHRD[0, :, :T], self.rows_KHRD[1, :, :T] = layer.keys[0], layer.values[0]


class Windows:
    """The sliding windows of one request in buffers that compiled steps append to; `layers` are their numbers."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """Find the windows among a cache's layers; nothing is copied yet."""
        self._layers = {n: layer for n, layer in enumerate(layers) if getattr(layer, "is_sliding", False)}
        self.layers = list(self._layers)
        self._windows: dict[int, _Window] = {}
        self._length = 0

    def locate(self, table_LX: Any, length: int) -> None:
        """Write where the layers' rows are for a step that appends the last of `length` tokens."""
        for index, layer in self._layers.items():
            window, size = self._windows.get(index), layer.sliding_window
            layer.leave([length - 1])
            if window is None or window.known is not layer.keys:
                window = self._windows[index] = _Window(layer, length - 1)
            rows_KHRD = window.rows_KHRD
            if length - window.start > rows_KHRD.shape[2]:
                first = length - size - window.start  # of the tokens that the next queries see
                rows_KHRD[:, :, : size - 1] = rows_KHRD[:, :, first : first + size - 1].clone()
                window.start += first
            tensors = (*rows_KHRD, window.norm_X)
            table_LX[index, [Layer.KEYS, Layer.VALUES, Layer.NORMS]] = [x.data_ptr() for x in tensors]
            sizes = size, rows_KHRD.shape[2], window.start
            table_LX[index, [Layer.WINDOW, Layer.WINDOW_ROOM, Layer.WINDOW_START]] = sizes
        self._length = length

    def leave(self) -> None:
        """Give the layers their tokens back, for a step module by module."""
        for index, window in self._windows.items():
            layer, end = self._layers[index], self._length - window.start
            first = max(0, end - layer.sliding_window + 1)
            if layer.keys is window.known:
                layer.keys, layer.values = window.rows_KHRD[:, None, :, first:end].clone()
                layer.cumulative_length = self._length
        self._windows.clear()
