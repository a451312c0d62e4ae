"""What cache layers beside full attention hold: windows, and states of linear attention and convolutions.

A window's tokens have positions: nobody writes into the tensors of a prompt, and a ring is written by position. A state
has none, and transformers overwrites it in place, as we do: `taken` copies states for `put_back`.
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
