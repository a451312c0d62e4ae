"""What passes over a few tokens show of a model: the shapes of its keys and values, and what its states lose.

Mixers of the Mamba 1 kind begin every pass of several tokens with an empty state, and Zamba 2's give another one than
steps of one token.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from sfi_core.errors import UnsupportedModelError
from sfi_core.hosts.transformers.attention import looking, routed
from sfi_core.hosts.transformers.cache import CACHE_NAME, SfiCache
from sfi_core.hosts.transformers.own_layers import of_own_kind, states
from sfi_core.state.layer_pages import LayerShape

Arrived = tuple[torch.Tensor, torch.Tensor, int]  # keys, values, and the number of query heads
# passes of so many tokens each that must leave the same states
EQUAL = {"a prompt in pieces": ((8,), (6, 2)), "a lossless run": ((6, 2), (6, 1, 1))}
PADDING = "padding"


def layer_shapes(model: Any) -> list[LayerShape]:
    """Return the shape of every layer's keys and values as they reach the attention, and its states.

    Latents are expanded by then. A model on the meta device computes nothing. Raise `UnsupportedModelError`
    where SFI cannot act, or where without weights the pass depends on data.
    """
    cache = SfiCache(model)
    arrived, owners = probe(model, cache), cache.owners
    if missed := [layer.index for layer in cache.managed if layer.index not in arrived]:
        raise UnsupportedModelError(
            f"{cache.name} has layers {missed} that do not attend through transformers' attention interface"
        )
    return [
        _shape(model, cache.layers[owners.get(index, index)], arrived.get(index), owners.get(index))
        for index in range(max(len(cache.layers) - 1, *arrived) + 1)
    ]


def cached_shapes(model: Any) -> list[LayerShape]:
    """Return the shapes of a token in transformers' own cache, layer by layer."""
    return [
        _shape(model, layer, None if getattr(layer, "keys", None) is None else (layer.keys, layer.values, 0), None)
        for layer in cached_layers(model, 1)
    ]


def cached_layers(model: Any, batch: int) -> list[Any]:
    """Return transformers' own cache layers after two tokens of `batch` requests."""
    cache = of_own_kind(DynamicCache(config=model.config.get_text_config(decoder=True)), model)
    probe(model, cache, (torch.zeros(batch, 2, dtype=torch.long, device=model.device), None))
    layers: list[Any] = cache.layers
    return layers


@torch.no_grad()
def probe(model: Any, cache: Any, *passes: tuple[torch.Tensor, torch.Tensor | None]) -> dict[int, Arrived]:
    """Run a model with an attention that only looks at what arrives; return that by full-attention or window layer.

    A pass has tokens, and the mask of all tokens so far; without any, one pass reads two tokens. `cache` is ours or
    transformers'; of the latter nothing is looked at.
    """
    arrived: dict[int, Arrived] = {}
    no_run: Any = object()  # no layer gets that far

    def look(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        B, heads, T = query.shape[:3]
        if isinstance(cache, SfiCache):
            index, layer = cache.attending(module) or (module.layer_idx, None)
            arrived[index] = key, value, heads
            if layer is not None:
                layer.pending = False
        return value.new_zeros(B, T, heads, value.shape[3]), None

    passes = passes or ((torch.zeros(1, 2, dtype=torch.long, device=model.device), None),)
    weightless, is_ours = model.device.type == "meta", isinstance(cache, SfiCache)
    try:
        with routed(model), looking(look), _without_experts(model) if weightless else nullcontext():
            for ids_BT, mask in passes:
                if is_ours:
                    cache.attach(no_run)
                model(input_ids=ids_BT, attention_mask=mask, use_cache=True, **{CACHE_NAME: cache})
                if is_ours:
                    cache.detach()
    except (RuntimeError, NotImplementedError) as error:
        if not weightless:
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} must show its shapes without weights; its forward pass depends on data"
        ) from error
    return arrived


def _shape(model: Any, layer: Any, arrived: Arrived | None, owner: int | None) -> LayerShape:
    # of a cache layer, where keys, values and query heads have arrived
    state_bytes = sum(state[:1].nbytes for _, _, state in states(layer)) if owner is None else 0
    if arrived is None:
        return LayerShape(
            heads=0, key_width=0, value_width=0, itemsize=model.dtype.itemsize, window=0, state_bytes=state_bytes
        )
    key, value, query_heads = arrived
    return LayerShape(
        heads=key.shape[1], key_width=key.shape[3], value_width=value.shape[3], itemsize=key.itemsize,
        window=layer.sliding_window if layer.is_sliding else None, query_heads=query_heads,
        state_bytes=state_bytes, owner=owner,
    )  # fmt: skip


@contextmanager
def _without_experts(model: Any) -> Iterator[None]:
    # to which experts a token goes would be data
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    for module in experts:
        module.forward = lambda hidden, *_, **__: hidden
    try:
        yield
    finally:
        for module in experts:
            del module.forward


class StateChecks:
    """The shapes of a model's layers, and what would put wrong numbers into its states, which is tried once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tried: dict[str, str] = {}
        self._shapes: list[LayerShape] = []

    @property
    def known(self) -> bool:
        """Whether the layers' shapes are known without a pass."""
        return bool(self._shapes)

    def shapes(self) -> list[LayerShape]:
        """Return the layers' shapes; the first call runs a pass over two tokens."""
        self._shapes = self._shapes or layer_shapes(self._model)
        return self._shapes

    def passes(self, asked: str) -> None:
        """Raise `UnsupportedModelError` if what is `asked`, of `EQUAL`, would change a state."""
        if mixer := self.mixer(asked):
            raise UnsupportedModelError(
                f"{asked} does not run with {type(self._model).__name__}: {mixer} computes another state in a pass of "
                "several tokens"
            )

    def padding(self, count: Sequence[int]) -> None:
        """Raise `UnsupportedModelError` if prompts of `count` tokens cannot be padded to a batch."""
        self.positions(count)
        if len(set(count)) > 1 and (mixer := self.mixer(PADDING)):
            self._refuse(count, f"padding enters the state of {mixer}")

    def positions(self, count: Sequence[int]) -> None:
        """Raise `UnsupportedModelError` if requests of `count` tokens cannot have positions of their own."""
        if len(set(count)) > 1 and "position_ids" not in inspect.signature(self._model.forward).parameters:
            self._refuse(count, "it takes no position_ids")

    def _refuse(self, count: Sequence[int], why: str) -> None:
        raise UnsupportedModelError(
            f"{type(self._model).__name__} must have requests of one length together, got {sorted(set(count))}: {why}; "
            "use max_batch=1"
        )

    def mixer(self, asked: str) -> str:
        """Return class and layer of the first mixer whose state what is `asked` would change; "" for none."""
        if asked not in self._tried:
            stated = any(shape.state_bytes for shape in self.shapes())
            self._tried[asked] = _differing(self._model, asked) if stated else ""
        return self._tried[asked]


def _differing(model: Any, asked: str) -> str:
    last = model.config.get_text_config(decoder=True).vocab_size - 1
    far = torch.finfo(model.dtype).eps ** 0.5  # relative: well above rounding
    ids_1T = torch.linspace(0, last, 8, device=model.device).long()[None]
    ways: list[list[tuple[torch.Tensor, torch.Tensor | None]]]
    if asked == PADDING:
        mask_1T = (torch.arange(8, device=model.device) >= 6).long()[None]  # noqa: PLR2004
        ways = [[(ids_1T[:, 6:], None)], [(ids_1T, mask_1T)]]
    else:
        ways = [[(part, None) for part in torch.split(ids_1T, list(sizes), 1)] for sizes in EQUAL[asked]]
    caches = [SfiCache(model) for _ in ways]
    for cache, passes in zip(caches, ways, strict=True):
        probe(model, cache, *passes)
    for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        pairs = zip(*(states(layer) for layer in layers), strict=True)
        if any((a - b).float().norm() > far * a.float().norm() for (_, _, a), (_, _, b) in pairs):
            return mixer_name(model, index)
    return ""


def mixer_name(model: Any, index: int) -> str:
    """Return class and layer of a model's mixer, for a message."""
    kinds = [type(module).__name__ for module in model.modules() if getattr(module, "layer_idx", None) == index]
    return f"{kinds[-1]} of layer {index}" if kinds else f"layer {index}"
