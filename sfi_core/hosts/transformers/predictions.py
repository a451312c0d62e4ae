"""Queries predicted half a layer early, for policies that choose by them (`codescan.ahead`, `freekv.ahead`).

Layer l's query is the projection of its normed input, the residual stream after layer l - 1. Half a layer before, the
residual lacks what layer l - 1's MLP will add; what the layer's own norm, projection and rotation make of it is the
prediction. The first layer has none, and chooses by its own query.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sfi_core.engine.attend import choose_early
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers import known as sources
from sfi_core.hosts.transformers.attention import probing
from sfi_core.hosts.transformers.cache import SfiCache, under_way
from sfi_core.hosts.transformers.fusion import LOOKS, rotated
from sfi_core.hosts.transformers.session import Session
from sfi_core.machine.private import has_hooks

LAYERS = sources.DECODER_LAYER | sources.GEMMA_LAYER
ATTENTIONS = sources.ATTENTION | sources.GEMMA_ATTENTION
NORMS = sources.RMS_NORM | sources.GEMMA_NORM
Forward = Callable[..., Any]


@contextmanager
def predicting(session: Session) -> Iterator[None]:
    """Inside, let the session's policy choose early; raise `ConfigError` where a query cannot be predicted."""
    _check(session)
    base = session.model.model
    layers = list(base.layers[: session.model.config.num_hidden_layers])
    norms = [getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm) for layer in layers[:-1]]
    wrapped = [(base.rotary_emb, _noting(base.rotary_emb.forward))]
    for index, norm in enumerate(norms, 1):
        looks = partial(_look, layers[index], index)
        wrapped.append((norm, _looking(norm.forward, looks)))
        setattr(norm, LOOKS, looks)
    before = [(module, vars(module).get("forward")) for module, _ in wrapped]
    for module, forward in wrapped:
        module.forward = forward
    try:
        yield
    finally:
        for norm in norms:
            delattr(norm, LOOKS)
        for module, forward in before:
            del module.forward
            if forward is not None:
                module.forward = forward


def _looking(norm: Forward, look: Callable[[torch.Tensor], None]) -> Forward:
    def forward(hidden_states: torch.Tensor) -> Any:
        look(hidden_states)
        return norm(hidden_states)

    return forward


def _noting(turn: Forward) -> Forward:
    # cosines and sines by kind of layer; "" where all turn alike
    names = inspect.signature(turn)

    def forward(*args: Any, **kwargs: Any) -> Any:
        turned, cache = turn(*args, **kwargs), _chooses()
        if cache is not None:
            cache.turns[names.bind(*args, **kwargs).arguments.get("layer_type", "")] = turned
        return turned

    return forward


def _chooses() -> SfiCache | None:
    # the cache of this thread's pass, if its policy chooses early
    cache = None if probing() else under_way.get()
    return cache if cache is not None and cache.run is not None and cache.run.policy.predicts else None


def _look(layer: Any, index: int, residual_BTI: torch.Tensor) -> None:
    cache = _chooses()
    if cache is not None and cache.run is not None:
        choose_early(cache.run, index, partial(_predicted, cache, layer, index, residual_BTI))


def _predicted(cache: SfiCache, layer: Any, index: int, residual_BTI: torch.Tensor) -> torch.Tensor:
    # the queries of each request's last token, [B, H, G, 1, D]
    attention, run = layer.self_attn, cache.run
    assert run is not None, "a pass is under way"
    turns = cache.turns.get("") or cache.turns[attention.config.layer_types[index]]
    last = slice(None) if cache.ragged is not None else slice(-1, None)
    cos, sin = (turn_BTD[:, last] for turn_BTD in turns)
    normed = layer.input_layernorm(residual_BTI[:, last])
    query_BTXD = attention.q_proj(normed).view(*normed.shape[:2], -1, attention.head_dim)
    source = ATTENTIONS[sources.digest(type(attention).forward)]
    query_BXTD = rotated(attention, source, query_BTXD, query_BTXD[:, :, :1], cos, sin)[0]
    if cache.ragged is not None:
        query_BXTD = cache.ragged.padded(query_BXTD)[:, :, -1:]
    key_PHND = run.store.pages(index).key_PHND
    B, X, _, D = query_BXTD.shape
    H = key_PHND.shape[1]
    return query_BXTD.reshape(B, H, X // H, 1, D).to(key_PHND.dtype)


def _check(session: Session) -> None:
    model, setting = session.model, f"{session.policy_name}.ahead"
    reason = ""
    if session.ranks.size > 1:
        reason = "tensor parallelism"
    elif (unknown := _unknown(model)) is not None:
        reason = f"{unknown}, whose queries sfi cannot predict"
    if reason:
        raise ConfigError(f"{setting} must be off with {reason}, got half")


def _unknown(model: Any) -> str | None:
    # the class of a module without which a query cannot be predicted; None where all are known
    base = getattr(model, "model", None)
    if base is None or sources.digest(type(base).forward) not in sources.MODEL:
        return type(base or model).__name__
    for layer in base.layers[: model.config.num_hidden_layers]:
        if sources.digest(type(layer).forward) not in LAYERS:
            return type(layer).__name__
        attention, norm = layer.self_attn, layer.input_layernorm
        if sources.digest(type(attention).forward) not in ATTENTIONS or has_hooks(attention.q_proj):
            return type(attention).__name__
        if not sources.rotates_halves(type(attention).forward):
            return type(attention).__name__
        if sources.digest(type(norm).forward) not in NORMS:
            return type(norm).__name__
    return None
