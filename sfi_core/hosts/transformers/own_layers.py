"""transformers' own cache layers beside ours: sliding windows, and states of linear attention and convolutions.

A window drops tokens by their positions: its layer makes new tensors and never writes into old ones. A state has no
positions, and transformers overwrites it in place: `taken` copies states, so that `put_back` can restore them.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

STATES = ("conv_states", "recurrent_states")
WINDOW = ("keys", "values", "cumulative_length", "is_initialized")


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


def take_states(layer: Any, other: Any) -> None:
    """Give a layer the states of another cache layer, as copies."""
    states = {name: value for name, value in other.__dict__.items() if isinstance(value, dict)}
    layer.__dict__.update(taken(states))


def held(layers: Iterable[Any]) -> dict[str, Any]:
    """Return what windows and states of cache layers hold: tensors and numbers by layer, name and state, for `hold`."""
    parts: dict[str, Any] = {}
    for index, layer in enumerate(layers):
        for name, value in taken(layer.__dict__).items():
            if isinstance(value, dict):
                parts |= {f"{index}.{name}.{number}": part for number, part in value.items() if part is not None}
            elif name in WINDOW and value is not None:
                parts[f"{index}.{name}"] = value
    return parts


def hold(layers: Sequence[Any], parts: Mapping[str, Any], batch: int, device: torch.device) -> None:
    """Let the windows and states of fresh cache layers hold copies of one request's, as `held` returned them.

    Raise KeyError, IndexError or ValueError for parts that the layers do not have.
    """
    for name, part in parts.items():
        index, what, *number = name.split(".")
        layer = layers[int(index)]
        value = part
        if isinstance(part, torch.Tensor):
            value = part.to(device).repeat(batch, *[1] * (part.dim() - 1))
            layer.dtype, layer.device = part.dtype, device
        if number:
            layer.__dict__[what][int(number[0])] = value
        elif what in WINDOW:
            setattr(layer, what, value)
        else:
            raise KeyError(what)


def seat_states(layer: Any, row: int, other: Any) -> None:
    """Give a row the states of a request that was read alone."""
    for kind, number, state in states(other):
        ours = getattr(layer, kind)[number].clone()
        ours[row] = state[0]
        getattr(layer, kind)[number] = ours


def seat_window(layer: Any, row: int, other: Any, width: int) -> None:
    """Give a row the window of a request that was read alone; the longest now has `width` tokens."""
    width_kept = min(width, layer.sliding_window - 1)
    for name in ("keys", "values"):
        large, theirs = (_last(getattr(held, name), width_kept) for held in (layer, other))
        large[row] = theirs[0]
        setattr(layer, name, large)
    layer.cumulative_length = width


def _last(rows_BHTD: torch.Tensor, count: int) -> torch.Tensor:
    # a copy of the last tokens, with zeros before them where there are not as many
    return torch.nn.functional.pad(rows_BHTD, (0, 0, count - rows_BHTD.shape[2], 0))


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
