"""The bytes that a decoding step reads: its time where memory is the bottleneck.

Weights are read once for the whole batch, keys and values once for each request. A slow step reads all keys
and values and 16 bytes of scores for each position and KV head, and copies the new sink and selected rows.
Layers with a sliding window read their window at every step, and a layer's states are read and written. Left
out: activations, the new token's keys and values, and time that is not spent on memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sfi_core.settings.config import SfiConfig

# bytes of a position and KV head: evidence, prior and scores of a fused Selector, in float32
SCORE_BYTES = 16
COPIED = 2  # a gathered row is read and written
STATED = 2  # and so is a state

# what an H100 reads at the rate of a copy, 3,037 GB/s, in the 45 us that the launches of a layer add to a step: there
# all steps take their bytes at that rate and 37 to 52 us a layer (docs/speed.md)
LAUNCHED = 137_000_000
# how much longer than a dense step's attention that of a verification takes there, by the rows of its tile: queries
# times query heads of a KV head, padded (docs/lossless.md); more rows need several tiles
TILES = {32: 1.08, 64: 1.16, 128: 1.73}

Count = npt.NDArray[Any] | float


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteModel:
    """A model's bytes, for each token that a request generates.

    The `batch` shares `weight_bytes`, the weights that a step reads; slow and fast requests run in one
    launch. `row_bytes` are a token's keys and values in the `layers` that SFI acts on, which have `heads` KV
    heads together; `dense_row_bytes` those in the `dense_layers` that are left dense. `windows` has window
    and row bytes of each sliding-window layer, `state_bytes` are those of all layers' states.
    """

    weight_bytes: float
    batch: int
    row_bytes: int
    heads: int
    layers: int
    dense_row_bytes: int = 0
    dense_layers: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    state_bytes: int = 0

    @classmethod
    def of(cls, model: Mapping[str, Any], *, dense_layers: Sequence[int] = (), batch: int = 1) -> Self:
        """Take the numbers from a trace manifest's `model`, whose `weight_bytes` count one token's experts."""
        full = [layer for layer in model["layers"] if layer["window"] is None]
        sparse = [layer for layer in full if layer["layer"] not in dense_layers]
        dense = [layer for layer in full if layer["layer"] in dense_layers]
        return cls(
            weight_bytes=model["weight_bytes"],
            batch=batch,
            row_bytes=sum(map(_row_bytes, sparse)),
            heads=sum(layer["heads"] for layer in sparse),
            layers=len(sparse),
            dense_row_bytes=sum(map(_row_bytes, dense)),
            dense_layers=len(dense),
            windows=tuple(
                (layer["window"], _row_bytes(layer)) for layer in model["layers"] if layer["window"] is not None
            ),
            state_bytes=sum(layer.get("state_bytes", 0) for layer in model["layers"]),
        )

    def dense(self, length: Count) -> Count:
        """Return a step's bytes under full attention, with `length` tokens in the cache."""
        return self._shared(length) + self.row_bytes * length

    def fast(self, length: Count, attended: Count) -> Count:
        """Return the bytes of a fast step that reads `attended` tokens for each KV head."""
        return self._shared(length) + self.row_bytes * attended

    def slow(self, length: Count, packed: Count) -> Count:
        """Return the bytes of a slow step that copies `packed` sink and selected tokens for each KV head."""
        return self.dense(length) + self.refresh(length, packed)

    def mean(self, length: Count, attended: Count, packed: Count, slow_rate: float) -> Count:
        """Return the mean bytes of a run's steps; `attended` is over all steps and full-attention layers."""
        layers = max(1, self.layers + self.dense_layers)
        sparse = (layers * attended - self.dense_layers * length) / max(1, self.layers)
        return self.fast(length, sparse) + slow_rate * self.refresh(length, packed)

    def mean_attended(self, length: Count, attended: Count) -> Count:
        """Return the mean over the full-attention layers, as a trace's `attended_tokens`."""
        layers = max(1, self.layers + self.dense_layers)
        return (self.layers * attended + self.dense_layers * length) / layers

    def refresh(self, length: Count, packed: Count) -> Count:
        """Return what a slow step adds to its reads: scores, and `packed` sink and selected tokens copied."""
        return SCORE_BYTES * self.heads * length + COPIED * self.row_bytes * packed

    def launches(self) -> float:
        """Return the bytes that a GPU could read while it launches a step's kernels."""
        return LAUNCHED * (self.layers + self.dense_layers + len(self.windows)) / self.batch

    def verified(self, length: Count, rows: int) -> Count:
        """Return what a GPU's attention for `rows` queries of a KV head adds to a dense step, in bytes."""
        *_, (most, _) = TILES.items()
        tile = next(tile for tile in TILES if tile >= min(rows, most))
        return (TILES[tile] * -(-rows // tile) - 1) * (self.dense(length) - self.dense(0))

    def _shared(self, length: Count) -> Count:
        # weights, layers left dense, sliding windows and states: the same for slow and fast steps
        windows = sum(row * np.minimum(window, length) for window, row in self.windows)
        return self.weight_bytes / self.batch + self.dense_row_bytes * length + windows + STATED * self.state_bytes


def fast_tokens(config: SfiConfig, selected: int, slow_rate: float) -> float:
    """Return a fast step's tokens for each KV head; anchored ones grow by half the steps between two slow ones."""
    grown = 0.5 / slow_rate if config.recent_mode == "anchored" and slow_rate else 0.0
    return config.sink + selected + config.recent + grown


def _row_bytes(layer: Mapping[str, Any]) -> int:
    width: int = layer["key_width"] + layer["value_width"]
    return int(layer["heads"] * width * layer["itemsize"])
