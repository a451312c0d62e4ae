"""transformers' view of a run: the `Cache`, its layers, and the argument that holds a model's cache.

The argument is `past_key_values`, which transformers 5.24 renamed to `cache`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from sfi_core.engine.prompt_cache import PromptCache
from sfi_core.engine.run import Run
from sfi_core.errors import UnsupportedModelError
from sfi_core.hosts.transformers.own_layers import of_own_kind, put_back, seat_states, taken
from sfi_core.hosts.transformers.window_layers import WindowLayer, WindowStateLayer
from sfi_kernels.step_descriptor import sent

OLD_NAME = "past_key_values"
CACHE_NAME = "cache" if "cache" in [f.name for f in fields(CausalLMOutputWithPast)] else OLD_NAME


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among a call's arguments, under either name; None if there is none."""
    return arguments.get(CACHE_NAME, arguments.get(OLD_NAME))


@dataclass(frozen=True, slots=True)
class RaggedRow:
    """The mapping between a row of X tokens and the padded batch [B, T] of an attention layer.

    `place_BT`: where in the row each request's tokens are, the last of T, 0 for padding; `place_X`: where in the
    flattened batch the row's tokens are.
    """

    place_BT: torch.Tensor
    place_X: torch.Tensor

    @classmethod
    def of(cls, count: Sequence[int], device: torch.device) -> Self:
        """Lay out `count` tokens of each request."""
        T = max(count)
        present_BT = torch.arange(T) >= T - torch.tensor(count)[:, None]
        place_BT = (present_BT.flatten().cumsum(0) - 1).view_as(present_BT) * present_BT
        return cls(sent(place_BT, device), sent(present_BT.flatten().nonzero()[:, 0], device))

    def padded(self, row_1HXD: torch.Tensor) -> torch.Tensor:
        """Return a row of queries, keys or values as a padded batch, [B, H, T, D]."""
        B, T = self.place_BT.shape
        flat_HYD = row_1HXD[0].index_select(1, self.place_BT.flatten())
        return flat_HYD.view(len(flat_HYD), B, T, -1).transpose(0, 1)

    def join(self, out_BHGTE: torch.Tensor) -> torch.Tensor:
        """Return a padded batch of outputs as a row, [1, H, G, X, E]."""
        flat_HGYE = out_BHGTE.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return flat_HGYE.index_select(2, self.place_X)[None]


class SfiLayer(CacheLayerMixin):
    """A full-attention layer of the cache; the run's pages hold the keys."""

    is_sliding = False
    attends = True

    def __init__(self, index: int, model: str = "") -> None:
        super().__init__()
        self.index, self.model = index, model
        self.seen = self.before = 0
        self.run: Run | None = None
        self.pending = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note dtype and device, as transformers expects of a layer."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys, maybe latents, which `sfi_attention` stores when they arrive there, expanded."""
        if self.run is None:
            raise UnsupportedModelError("an sfi cache works inside slow_fast(...) only")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[2]
        self.pending = True
        return key_states, value_states

    def store(self, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, index: int) -> Run:
        """Store the attention's keys and values in the run's pages; if another layer attends, lend it ours."""
        assert self.run is not None, "`update` has seen it"
        if index != self.index:
            self.run.lend(self.index, index)
            return self.run
        self.pending = False
        self.run.append(self.index, key_BHTD, value_BHTE)
        return self.run

    def places(self) -> tuple[torch.Tensor, ...] | None:
        """Return where the layer's new keys and values go, for a host that writes them itself; see `Run.places`."""
        return None if self.run is None else self.run.places(self.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the padded length after the update, and no offset."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Return the padded length."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1, for no maximum."""
        return -1

    def reset(self) -> None:
        """Refuse: a run has one prompt."""
        raise UnsupportedModelError("an sfi cache cannot be reset; make a new one")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refuse: a model that copies a layer adds layers to the cache. A Dory does so where it loops over layers."""
        raise UnsupportedModelError(f"{self.model} copies layer {self.index} of its cache, which sfi does not know")


class SfiStateLayer(SfiLayer, LinearAttentionLayer):
    """A layer that attends to everything and has states as well, which stay transformers' own."""

    def __init__(self, index: int, model: str, number_of_states: int) -> None:
        SfiLayer.__init__(self, index, model)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Begin with keys and values, or with a state: transformers names the states' arguments only."""
        (SfiLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


class StepsOfACache(Protocol):
    """The replayed steps of a run under a loop that is not sfi's (`replays.Replays`)."""

    def next_step(self, run: Run, tokens: int, against: str = "") -> AbstractContextManager[bool]:
        """Say whether the step of so many tokens that the body runs is replayed, if nothing is `against` it."""

    def replay_given(self, run: Run, ids_B1: torch.Tensor, position_B1: torch.Tensor | None) -> torch.Tensor:
        """Replay a step that the run has begun; return logits, [B, V]."""

    def eager_pass(self) -> AbstractContextManager[None]:
        """Run the pass in the body module by module."""


def _fresh_layers(model: PreTrainedModel) -> list[Any]:
    text = model.config.get_text_config(decoder=True)
    layers, kinds = list(DynamicCache(config=text).layers), getattr(text, "layer_types", None)
    for index, layer in enumerate(layers):  # states and layers without a cache stay as they are
        if type(layer) is cache_utils.DynamicLayer:
            layers[index] = SfiLayer(index, type(model).__name__)
        elif type(layer) is cache_utils.LinearAttentionAndFullAttentionLayer:
            layers[index] = SfiStateLayer(index, type(model).__name__, layer.number_of_states)
        elif type(layer) is cache_utils.DynamicSlidingWindowLayer:
            chunked = kinds is not None and kinds[index] == "chunked_attention"
            layers[index] = WindowLayer(index, layer.sliding_window, chunked=chunked)
        elif type(layer) is cache_utils.LinearAttentionAndSlidingWindowAttentionLayer:
            layers[index] = WindowStateLayer(index, layer.sliding_window, layer.number_of_states)
    return layers


class SfiCache(cache_utils.Cache):
    """transformers' view of a run: `SfiLayer` for full attention, `WindowLayer` for windows, its own for states.

    The pages are allocated once for `capacity` tokens a request, when that is known; `prompt_length` are the
    padded tokens of the prompts, when known: a piece that ends before them is not step 0. `stop_ids` end a
    request. `requests` counts those that wait for a row too, None for those of the batch; `generated` are the
    most tokens that one generates, None for what `capacity` leaves; all begin with the same `beginning` tokens of
    `known`, at least. The `run` is made at the first forward pass.
    `owners` are the layers that read another layer's keys, with that layer; `known` is the prompt of the last call of
    `model.generate`; `on_prompt_end` hears of the padded tokens so far when a prompt has been read.

    Of the pass under way: `ragged` is its layout, where one row holds several requests' tokens; `span` its observers'
    spans; `turns` are cosines and sines of its positions by kind of layer, where queries are predicted; `planned` says
    that the engine has planned it, so that it begins no step; `shadowed` that it is an audited step's dense twin, whose
    next-token logits are `dense_BV`; `replayed` that it is a step which `replays` replays.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int | None = None,
        prompt_length: int | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        text, self.name = model.config.get_text_config(decoder=True), type(model).__name__
        super().__init__(layers=_fresh_layers(model))
        of_own_kind(self, model)
        self.owners = owners(text)
        self.capacity, self.prompt_length, self.stop_ids = capacity, prompt_length, stop_ids
        self.requests: int | None = None
        self.generated: int | None = None
        self.beginning = 0
        self.run: Run | None = None
        self.ragged: RaggedRow | None = None
        self.span = ExitStack()
        self.planned = self.shadowed = self.replayed = False
        self.dense_BV: torch.Tensor | None = None
        self.replays: StepsOfACache | None = None
        self.known: PromptCache | None = None
        self.turns: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.on_prompt_end: Callable[[int], None] | None = None

    def renew(self, model: PreTrainedModel, capacity: int) -> None:
        """Begin anew, with room for at least `capacity` tokens a request."""
        self.layers, self.run, self.replays = _fresh_layers(model), None, None
        self.capacity = max(self.capacity or 0, capacity)

    @property
    def managed(self) -> list[SfiLayer]:
        """The full-attention layers that have keys of their own."""
        return [layer for layer in self.layers if isinstance(layer, SfiLayer)]

    @property
    def windows(self) -> list[WindowLayer]:
        """The layers of sliding windows and of chunks."""
        return [layer for layer in self.layers if isinstance(layer, WindowLayer)]

    @property
    def ours(self) -> list[SfiLayer | WindowLayer]:
        """The layers whose decoding steps we attend in."""
        return [*self.managed, *self.windows]

    def attending(self, module: Any) -> tuple[int, SfiLayer | WindowLayer] | None:
        """Return the number of the layer that a module computes, and the layer with its keys.

        None where transformers attends: also in a window's layer that reads a prompt. A module that several layers
        share (Zamba, HRM) has no number, or one of theirs: its layer has just been updated. Raise
        `UnsupportedModelError` for keys nowhere or read twice.
        """
        index = -1 if module.layer_idx is None else module.layer_idx
        owner = self.owners.get(index, index)
        layer = self.layers[owner] if 0 <= owner < len(self.layers) else None
        ours = isinstance(layer, SfiLayer | WindowLayer) and layer.attends
        if owner == index and (layer is None or (ours and not layer.pending)):
            layer = next((other for other in self.ours if other.pending), layer)
            owner = index = index if layer is None else layer.index
        if not isinstance(layer, CacheLayerMixin):
            raise UnsupportedModelError(f"{type(module).__name__} of layer {index} attends to keys that no cache has")
        if not (isinstance(layer, SfiLayer | WindowLayer) and layer.attends):
            return None
        if layer.pending == (owner != index):
            raise UnsupportedModelError(
                f"{type(module).__name__} of layer {index} attends twice, or to keys of its own"
            )
        return index, layer

    @property
    def seen(self) -> int:
        """Padded tokens so far."""
        return self.managed[0].seen

    def see(self, seen: int) -> None:
        """Count `seen` padded tokens in every layer that has positions."""
        for layer in self.managed:
            layer.seen = seen
        for window in self.windows:
            window.cumulative_length = seen

    def attach(self, run: Run) -> Self:
        """Give the layers their run for a forward pass."""
        self.run = run
        for layer in self.managed:
            layer.run, layer.before = run, layer.seen
        for window in self.windows:
            window.run = run
        return self

    def seat(self, row: int, other: Self, width: int) -> None:
        """Give a row to a request that was read alone; the longest now has `width` tokens."""
        assert self.run is not None, "it has a row to give"
        for layer, alone in zip(self.layers, other.layers, strict=True):
            seat_states(layer, row, alone)
            if isinstance(layer, SfiLayer):
                layer.seen = width
            elif isinstance(layer, WindowLayer):
                layer.seat(self.run, row, alone, width)
        self.prompt_length = width  # so that what comes next is no piece of a prompt

    def taken(self) -> list[dict[str, Any]]:
        """Return what the layers hold, for `put_back`."""
        return [taken(layer.__dict__) for layer in self.layers]

    def put_back(self, held: Sequence[dict[str, Any]]) -> None:
        """Let the layers hold what they held; `held` may be put back again."""
        for layer, values in zip(self.layers, held, strict=True):
            put_back(layer, values)

    def detach(self) -> None:
        """Take the run from the layers; raise `UnsupportedModelError` for keys that missed attention or cache."""
        for layer in self.ours:
            layer.run = None
        if missed := [layer.index for layer in self.ours if layer.pending]:
            raise UnsupportedModelError(
                f"{self.name} has layers {missed} that do not attend through transformers' attention interface"
            )
        if idle := [layer.index for layer in self.managed if layer.seen == layer.before]:
            raise UnsupportedModelError(f"{self.name} has layers {idle} that keep no keys in its cache")


def owners(text: Any) -> dict[int, int]:
    """Return the layers of a text config that read the keys of the last of their kind with its own (Gemma 3n and 4)."""
    shared, kinds = getattr(text, "num_kv_shared_layers", None) or 0, getattr(text, "layer_types", None) or []
    first = len(kinds) - shared
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    return {index: last[kinds[index]] for index in range(first, len(kinds)) if kinds[index] in last}


# the cache of this thread's forward pass under sfi; None for a pass that stays as it is without sfi
under_way: ContextVar[SfiCache | None] = ContextVar("under_way", default=None)
