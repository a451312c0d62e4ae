"""transformers' own cache layers beside ours: sliding windows, and states of linear attention and convolutions.

A window drops tokens by their positions: its layer makes new tensors and never writes into old ones. A state has no
positions, and transformers overwrites it in place, as we do: `taken` copies states for `put_back`.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sfi_kernels.tables import Layer

STATES = ("conv_states", "recurrent_states")
WINDOW = ("keys", "values", "cumulative_length", "is_initialized")
SPARE = 512  # tokens that compiled steps append to a window until it moves to the front of its buffer


def states(layer: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the states of a cache layer that has some: their kind, number and tensor, [B, ...]."""
    for kind in STATES:
        for number, state in getattr(layer, kind, {}).items():
            if state is not None:
                yield kind, number, state


def taken(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a cache layer holds, its `__dict__`, to be put back later; states are copied."""
    return {
        name: {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in held.items()
    }


def put_back(layer: Any, held: Mapping[str, Any]) -> None:
    """Let a cache layer hold what `taken` took from it; states are copied to where they are, which graphs know."""
    for name, value in taken(held).items():
        known = layer.__dict__[name]
        if isinstance(value, dict):
            for number, part in value.items():
                if isinstance(part, torch.Tensor) and isinstance(known.get(number), torch.Tensor):
                    value[number] = known[number].copy_(part)
        layer.__dict__[name] = value


def take_states(layer: Any, other: Any) -> None:
    """Give a layer the states of another cache layer, as copies."""
    layer.__dict__.update(taken({name: value for name, value in other.__dict__.items() if isinstance(value, dict)}))


def held(layers: Iterable[Any]) -> dict[str, Any]:
    """Return what windows and states of cache layers hold: tensors and numbers by layer, name and state, for `hold`."""
    parts: dict[str, Any] = {}
    for index, layer in enumerate(layers):
        for name, value in taken(layer.__dict__).items():
            if isinstance(value, dict):
                parts |= {f"{index}.{name}.{number}": part for number, part in value.items() if part is not None}
            elif name in WINDOW and value is not None:
                # a view of the whole piece's keys
                parts[f"{index}.{name}"] = value.clone() if isinstance(value, torch.Tensor) else value
    return parts


def hold(layers: Sequence[Any], parts: Mapping[str, Any], batch: int, device: torch.device) -> None:
    """Let windows and states of fresh cache layers hold copies of one request's or a batch's, as `held` has them."""
    for name, part in parts.items():
        index, what, *number = name.split(".")
        layer = layers[int(index)]
        value = part
        if isinstance(part, torch.Tensor):
            value = part.to(device).repeat(batch // len(part), *[1] * (part.dim() - 1))
            layer.dtype, layer.device = part.dtype, device
        if number:
            layer.__dict__[what][int(number[0])] = value
        else:
            setattr(layer, what, value)


def alike(layers: Sequence[Any], others: Mapping[int, Mapping[str, Any]]) -> bool:
    """Say whether layers that have read some tokens would hold such parts after so many: names, shapes and dtypes."""
    known = held(layers)

    def kinds(parts: Mapping[str, Any]) -> dict[str, Any]:
        return {name: (x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for name, x in parts.items()}

    def after(place: int) -> Iterator[tuple[str, Any]]:
        for name, part in known.items():
            index, what, *_ = name.split(".")
            if what in ("keys", "values"):
                yield name, part[:, :, :1].expand(-1, -1, min(place, layers[int(index)].sliding_window - 1), -1)
            else:
                yield name, place if what == "cumulative_length" else part

    return all(kinds(parts) == kinds(dict(after(place))) for place, parts in others.items())


def seat_states(layer: Any, row: int, other: Any) -> None:
    """Give a row the states of a request that was read alone."""
    for kind, number, state in states(other):
        getattr(layer, kind)[number][row] = state[0]  # in place: graphs know the address


def seat_window(layer: Any, row: int, other: Any, width: int) -> None:
    """Give a row the window of a request that was read alone; the longest now has `width` tokens."""
    count = min(width, layer.sliding_window - 1)
    for name in ("keys", "values"):
        # copies of the last tokens, with zeros before them where there are not as many
        batch, alone = (
            torch.nn.functional.pad(rows_BHTD, (0, 0, count - rows_BHTD.shape[2], 0))
            for rows_BHTD in (getattr(layer, name), getattr(other, name))
        )
        batch[row] = alone[0]
        setattr(layer, name, batch)
    layer.cumulative_length = width


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


class _LinearStates:
    # the states of a MiniMax in the cache's layers, where all other models have them
    def get_linear_cache(self: Any, layer_idx: int) -> torch.Tensor | None:
        state: torch.Tensor | None = self.layers[layer_idx].recurrent_states[0]
        return state

    def set_linear_cache(self: Any, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.layers[layer_idx].update_recurrent_state(linear_cache)

    def __len__(self: Any) -> int:
        return len(self.layers)


def of_own_kind(cache: Any, model: Any) -> Any:
    """Return a cache as an instance of the one class that its model takes; only a MiniMax is particular."""
    particular = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
    if particular is not None:
        kind = type(cache)
        bases = (particular,) if issubclass(particular, kind) else (kind, particular)
        cache.__class__ = type(kind.__name__, (_LinearStates, *bases), {})
    return cache
