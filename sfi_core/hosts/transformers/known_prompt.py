"""A prompt that begins like one before: its beginning comes from a `PromptCache`, and it leaves itself there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from sfi_core.engine.prompt_cache import PromptCache
from sfi_core.engine.run import Run
from sfi_core.errors import ConfigError, InputError, UnsupportedModelError
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.hosts.transformers.own_layers import held, hold
from sfi_core.hosts.transformers.session import Session
from sfi_core.observers.events import PromptEvent
from sfi_core.state.kv_store import KVStore

TAIL = 256  # last tokens of a prompt that the next one may not share: windows and states are kept before them too


class KnownPrompt:
    """What a run of some prompts takes from a `PromptCache`, and whether it `leaves` its one prompt there."""

    def __init__(
        self, known: PromptCache, session: Session, cache: SfiCache, prompts: Sequence[Sequence[int]], *, leaves: bool
    ) -> None:
        """Raise `ConfigError` for a cache of another model or on several ranks, `InputError` for other layers."""
        if session.ranks.size > 1:
            raise ConfigError("a prompt cache must be of one process, got several ranks")
        if known.tokens and known.model != session.model_key:
            raise ConfigError("a prompt cache must be of this model, its dtype and its kv_dtype, got another's")
        shapes = enumerate(session.shapes())
        full = {index: shape for index, shape in shapes if shape.window is None and shape.owner is None}
        widths = {index: (shape.heads, shape.key_width, shape.value_width) for index, shape in full.items()}
        T = len(known.tokens)
        sizes = {index: [(1, H, T, D), (1, H, T, E)] for index, (H, D, E) in widths.items()}
        if known.tokens and sizes != {index: [tuple(x.shape) for x in pair] for index, pair in known.layers.items()}:
            raise InputError("a prompt cache must have the model's layers, heads and widths, got others")
        self._known, self._session, self._cache = known, session, cache
        self._prompts, self._leaves = prompts, leaves
        self._hosted = any(shape.hosted for shape in session.shapes())
        self._after: dict[int, dict[str, Any]] = {}

    @property
    def _run(self) -> Run:
        assert self._cache.run is not None, "the run has begun"
        return self._cache.run

    def _in_pieces(self) -> bool:
        # tried at the first use: it takes passes of the model
        try:
            self._session.state_checks.passes("a prompt in pieces")
        except UnsupportedModelError:
            return False
        return True

    def begin(self, ids_BT: torch.Tensor) -> int:
        """Begin the run with what is known of the prompts, padded on the left; return the column to go on from."""
        known, run, prompts = self._known, self._run, self._prompts
        window, width = run.policy.config.window_prefill, ids_BT.shape[1]
        column = known.column(prompts, window, hosted=self._hosted) if known.tokens and self._in_pieces() else 0
        if not column:
            return 0
        count = [max(0, column - width + len(prompt)) for prompt in prompts]
        requests = run.requests_of(range(len(count)))
        run.observer.on(PromptEvent(requests=requests, ids_BT=ids_BT[:, :column], count=tuple(count)))
        run.begin_prefill(count, final=False)
        for state, tokens in zip(run.requests, count, strict=True):
            state.tally.known = tokens
        with run.observer.span("prefill"):
            for index, pair in known.layers.items():
                run.append(index, *(_rows(part, count, ids_BT.device) for part in pair))
        try:
            hold(self._cache.layers, known.others.get(column, {}), len(count), ids_BT.device)
        except (KeyError, IndexError, ValueError) as error:
            raise InputError("a prompt cache must have the model's windows and states, got others") from error
        for layer in self._cache.managed:
            layer.seen, layer.is_initialized = column, True
        self._after = {place: parts for place, parts in known.others.items() if place <= column}
        return column

    def stops(self, stops: Sequence[int]) -> Sequence[int]:
        """Return where pieces of the prompts end that would end at `stops`."""
        *_, width = stops
        extra = {width - TAIL} if self._leaves and self._hosted and self._in_pieces() else set()
        return sorted({*stops, *(place for place in extra if place > max(self._after, default=0))})

    def see(self, place: int) -> None:
        """Note what windows and states hold after so many tokens."""
        if self._leaves and self._hosted:
            self._after[place] = held(self._cache.layers)

    def leave(self) -> None:
        """Leave the run's one prompt in the cache, if it does."""
        if not self._leaves:
            return
        run, known, (prompt,) = self._run, self._known, self._prompts
        known.tokens, known.model, known.others = list(prompt), self._session.model_key, self._after
        known.layers = {
            index: _read(run.store, index, len(prompt)) for index in run.layers - set(run.store.layers.owners)
        }


def _read(store: KVStore, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    # the keys and values of a store's one request
    parts = []
    for _, *pair in store.blocks(layer, 0, length):
        # of two tiers the next block is written over this one, and the device has no room for all
        parts.append(pair if store.whole_on_device else [part.cpu().clone() for part in pair])
    key, value = (part[0] if len(part) == 1 else torch.cat(part, 2) for part in zip(*parts, strict=True))
    return key, value


def _rows(part_1HTX: torch.Tensor, count: Sequence[int], device: torch.device) -> torch.Tensor:
    # the first `count` tokens for each row, padded on the left
    width = max(count)
    first = part_1HTX[:, :, :width].to(device)
    if min(count) == width:
        return first.expand(len(count), -1, -1, -1)
    return torch.cat([pad(first[:, :, :tokens], (0, 0, width - tokens, 0)) for tokens in count])
