"""How a model's attention and masks get to sfi, for the forward passes that are under sfi and no others.

Inside `routed`, transformers calls `attention` and `mask` for every pass of the model in every thread. They are the
model's own, but where this thread's pass has an sfi cache (`under_way`), or is a probe (`looking`).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sfi_core.errors import UnsupportedModelError
from sfi_core.hosts.transformers.cache import under_way
from sfi_core.hosts.transformers.checks import check_supported
from sfi_core.machine.private import attention_implementation

NAME = "sfi"
IN_RUN = "sfi-run"  # under this name transformers' table has the attention of passes with an sfi cache
Attended = tuple[torch.Tensor, torch.Tensor | None]

_look: ContextVar[Callable[..., Attended] | None] = ContextVar("look", default=None)
# The attention implementations of models that are or were routed through sfi, by the identity of their parts' configs:
# all that transformers tells a mask function. They outlive `routed`: another thread's pass may be on its way.
_plain: dict[int, str] = {}
_users: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()
_changing = Lock()


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Attended:
    """Attend as this thread's pass asks; arguments and results are transformers'."""
    attend = _look.get()
    if attend is None:
        attend = _plain_attention(module) if under_way.get() is None else ALL_ATTENTION_FUNCTIONS[IN_RUN]
    return attend(module, query, key, value, *args, **kwargs)


def _plain_attention(module: torch.nn.Module) -> Callable[..., Any]:
    # what a module attends with where sfi is not installed; each of transformers' files has an eager function
    sources = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    eager = (
        eager_attention
        for source in sources
        if (eager_attention := getattr(source, "eager_attention_forward", None)) is not None
    )
    name = _plain.get(id(module.config), "sdpa")
    plain: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, next(eager, sdpa_attention_forward))
    return plain


@contextmanager
def routed(model: PreTrainedModel) -> Iterator[None]:
    """Inside, route a model's attention through sfi.

    It differs from the model's own only where `under_way` or `looking` say so, thus in no other thread. Raise
    `UnsupportedModelError` for an architecture that cannot run under SFI.
    """
    check_supported(model)
    with _changing:
        if not _users.get(model):
            _route(model)
        _users[model] = _users.get(model, 0) + 1
    try:
        yield
    finally:
        with _changing:
            _users[model] -= 1
            if not _users[model]:
                model.set_attn_implementation(_plain[id(model.config)])


def _route(model: PreTrainedModel) -> None:
    AttentionInterface.register(NAME, attention)
    # without a mask function sliding windows would ignore padding silently
    AttentionMaskInterface.register(NAME, mask)
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for identity, config in configs.items():
        if identity not in _plain:
            finalize(config, _plain.pop, identity, None)
        if (implementation := attention_implementation(config)) != NAME:  # another model may share the config
            _plain[identity] = implementation
    previous = attention_implementation(model.config)
    model.set_attn_implementation(NAME)
    if attention_implementation(model.config.get_text_config(decoder=True)) != NAME:
        model.set_attn_implementation(previous)
        raise UnsupportedModelError(f"{type(model).__name__} does not use transformers' attention interface")


@contextmanager
def looking(look: Callable[..., Attended]) -> Iterator[None]:
    """Inside, attend by `look` in this thread: a probe, which is no step of a session."""
    before = _look.set(look)
    try:
        yield
    finally:
        _look.reset(before)


def probing() -> bool:
    """Say whether this thread's passes are probes."""
    return _look.get() is not None


def mask(*args: Any, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """Make the mask for a layer's attention; arguments are those of transformers' `sdpa_mask`.

    Return None for the full-attention layers of a run: a request's tokens are those in its pages, and a mask
    would take [B, 1, T, T] bytes that nobody reads. For sliding windows return `sdpa_mask`'s mask, [B, 1, T, S] bool or
    None. A mask function of the model's own may differ from the causal one, where Gemma sees all of an image for one:
    `sfi_attention` then refuses its mask. Outside a run the mask is the model's own.
    """
    make: Callable[..., torch.Tensor | None] | None = sdpa_mask
    runs = under_way.get() is not None and not probing()
    if not (runs or probing()):
        make = ALL_MASK_ATTENTION_FUNCTIONS.get(_plain.get(id(config), "sdpa"))
    if make is None or (runs and kwargs.get("mask_function", causal_mask_function) is causal_mask_function):
        return None
    made = make(*args, config=config, **kwargs)
    if runs and made is not None and kwargs.get("local_size") is None:
        causal = sdpa_mask(*args, config=config, **{**kwargs, "mask_function": causal_mask_function})
        return None if causal is not None and torch.equal(made, causal) else made
    return made
