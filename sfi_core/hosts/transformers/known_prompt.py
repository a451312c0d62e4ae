"""Prompts that were read before: what a run takes from a `PromptCache` or a `SharedPrompt`, and leaves in a cache."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from sfi_core.engine.batch_pass import Watcher
from sfi_core.engine.layer import Layer
from sfi_core.engine.prompt_cache import PromptCache
from sfi_core.engine.run import Run
from sfi_core.engine.select import end_prompt
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.errors import ConfigError, InputError
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.hosts.transformers.own_layers import alike, held, hold
from sfi_core.hosts.transformers.session import Session
from sfi_core.hosts.transformers.shapes import probe
from sfi_core.state.kv_store import KVStore

TAIL = 256  # last tokens of a prompt that the next one may not share: windows and states are kept before them too


class KnownPrompt:
    """What a run of some prompts takes from a `PromptCache`, and whether it `leaves` its one prompt there."""

    def __init__(
        self, known: PromptCache, session: Session, cache: SfiCache, prompts: Sequence[Sequence[int]], *, leaves: bool
    ) -> None:
        """Raise `ConfigError` for a cache of another model or on several ranks, `InputError` for other tensors."""
        if session.ranks.size > 1:
            raise ConfigError("a prompt cache must be of one process, got several ranks")
        if known.tokens and known.model != session.model_key:
            raise ConfigError("a prompt cache must be of this model, its dtype and its kv_dtype, got another's")
        if known.tokens:
            _check(known, session)
        self._known, self._session, self._cache = known, session, cache
        self._prompts, self._leaves = prompts, leaves
        self._hosted = _hosted(session)
        self._after: dict[int, dict[str, Any]] = {}

    @property
    def _run(self) -> Run:
        assert self._cache.run is not None, "the run has begun"
        return self._cache.run

    def begin(self, ids_BT: torch.Tensor) -> int:
        """Begin the run with what is known of the prompts, padded on the left; return the column to go on from."""
        known, run, prompts, width = self._known, self._run, self._prompts, ids_BT.shape[1]
        column = _column(known, self._session, prompts)
        if not column:
            return 0
        count = [max(0, column - width + len(prompt)) for prompt in prompts]
        run.begin_prefill(count, ids_BT[:, :column], final=False)
        for state, tokens in zip(run.requests, count, strict=True):
            state.tally.known = tokens
        with run.observer.span("prefill"):
            _enter(run, self._cache, self._rows(column), known.others.get(column, {}))
        self._after = {place: parts for place, parts in known.others.items() if place <= column}
        return column

    def _rows(self, column: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        # each layer's keys and values behind those in shared pages, up to the column
        known, run, store = self._known, self._run, self._run.store
        columns, moved = slice(store.shared - known.first, column - known.first), store.shared if known.moves else 0
        for index, (key, value) in known.layers.items():
            if store.shared and run.step < 0:  # the first prompts
                with run.launches():
                    store.share(index, *(part[:, :, : store.shared].to(run.device) for part in (key, value)))
            if moved > known.first:
                known.layers[index] = key[:, :, moved:].clone(), value[:, :, moved:].clone()
            yield index, [part[:, :, columns].to(run.device).expand(store.batch, -1, -1, -1) for part in (key, value)]
        known.first = moved

    def stops(self, stops: Sequence[int]) -> Sequence[int]:
        """Return where pieces of the prompts end that would end at `stops`."""
        *_, width = stops
        extra = {width - TAIL} if self._leaves and self._hosted and _in_pieces(self._session) else set()
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


def common_tokens(known: PromptCache, session: Session, prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all prompts begin with and take from the cache, together or one by one."""
    length = [len(prompt) for prompt in prompts]
    return max(0, _column(known, session, prompts) - max(length) + min(length))


def _column(known: PromptCache, session: Session, prompts: Sequence[Sequence[int]]) -> int:
    if not known.tokens or not _in_pieces(session):
        return 0
    return known.column(prompts, session.policy.config.window_prefill, hosted=_hosted(session))


def _hosted(session: Session) -> bool:
    return any(shape.hosted for shape in session.shapes())


def _in_pieces(session: Session) -> bool:
    # tried at the first use: it takes passes of the model
    return not session.state_checks.mixer("a prompt in pieces")


def _check(known: PromptCache, session: Session) -> None:
    # a crafted file may have the model's key and other tensors
    asked, T = session.kv_dtype or session.model.dtype, len(known.tokens) - known.first
    expected: dict[int, list[Any]] = {}
    for index, shape in enumerate(session.shapes()):
        if shape.window is None and shape.owner is None:
            dtype = asked if asked.itemsize == shape.itemsize else torch.float32
            expected[index] = [((1, shape.heads, T, width), dtype) for width in (shape.key_width, shape.value_width)]
    if expected != {index: [(tuple(x.shape), x.dtype) for x in pair] for index, pair in known.layers.items()}:
        raise InputError("a prompt cache must have the model's layers, heads, widths and dtype, got others")
    if known.checked:
        return
    cache = SfiCache(session.model)
    if known.others:
        probe(session.model, cache)
    if not alike(cache.layers, known.others):
        raise InputError("a prompt cache must have the model's windows and states, got others")
    if not known.finite:
        raise InputError("a prompt cache must have finite numbers, got NaN or infinity")
    known.checked = True


def _read(store: KVStore, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    # the keys and values of a store's one request
    key, value = store.keys(layer, 0, 0, length), store.values(layer, 0, 0, length)
    # of two tiers the device has no room for all layers'
    return (key, value) if store.whole_on_device else (key.cpu().clone(), value.cpu().clone())


def begin_shared(shared: SharedPrompt, session: Session, cache: SfiCache, watchers: tuple[Watcher, ...]) -> None:
    """Start a run at the end of prompts that were read, with a first selection of its own.

    Raise `ConfigError` if its policy needs queries that were not kept.
    """
    needed, store, longest = session.policy.config.window_prefill, shared.store, max(shared.count)
    if shared.window is not None and needed > shared.window:
        raise ConfigError(f"window must keep {needed} queries of the prompt, got {shared.window}")
    used = None if shared.copied else store
    run = session.start(cache, len(shared.count), longest, store=used, watchers=watchers)
    run.meter.prefill_seconds = shared.seconds
    for state in run.requests:
        state.tally.prefill_seconds = shared.seconds
    reads = store.keys, store.values
    run.begin_prefill(shared.count, shared.ids_BT, final=True)
    rows = (
        (index, [torch.cat([read(index, row, 0, longest) for row in range(store.batch)]) for read in reads])
        for index in (store.layers if shared.copied else ())
    )
    with run.observer.span("prefill"):
        _enter(run, cache, rows, shared.others)
        for reader, owner in store.layers.owners.items():
            run.lend(owner, reader)
        for index, prompt in shared.layers.items():
            run.layers.add(index)
            layer = Layer(run, index, **prompt.options)
            query_BHGTD = prompt.query_BHGTD.to(layer.pages.key_PHND.dtype)
            with run.launches():
                end_prompt(layer, query_BHGTD)
                run.tell(layer, query_BHGTD, query_BHGTD[..., :1])


def _enter(
    run: Run, cache: SfiCache, rows: Iterable[tuple[int, list[torch.Tensor]]], others: Mapping[str, Any]
) -> None:
    # fill the pass's tokens in, with each layer's keys and values, [B, H, T, X], of which a request has the first
    count = run.batch_pass.count
    fresh = [tokens - run.store.shared for tokens in count]
    for index, pair in rows:
        run.append(index, *(_padded(part_BHTX, fresh) for part_BHTX in pair))
    hold(cache.layers, others, run.store.batch, run.device)
    for layer in cache.managed:
        layer.seen, layer.is_initialized = max(count), True


def _padded(part_BHTX: torch.Tensor, count: Sequence[int]) -> torch.Tensor:
    # the first `count` tokens of each request last, as `append` takes them
    T = part_BHTX.shape[2]
    if min(count) == T:
        return part_BHTX
    rows = zip(part_BHTX, count, strict=True)
    return torch.stack([pad(part_HTX[:, :tokens], (0, 0, T - tokens, 0)) for part_HTX, tokens in rows])
