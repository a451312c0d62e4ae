"""A model's attention and masks, for the forward passes that are under sfi and no others.

Inside `routed`, transformers calls `attention` and `mask` for every pass of the model in every thread. They are the
model's own, but where this thread's pass has an sfi cache (`under_way`), or is a probe (`looking`).

A layer calls `Cache.update(keys, values)`, then the attention with the result. `SfiLayer.update` returns the new keys
unchanged; `sfi_attention` stores them, heads expanded, in the run's pages. A layer whose keys never arrive is refused:
it would run dense without a word.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sfi_core.distributed.ranks import local
from sfi_core.engine.attend import attend
from sfi_core.errors import ConfigError, UnsupportedModelError
from sfi_core.hosts.transformers.cache import under_way
from sfi_core.hosts.transformers.checks import check_supported
from sfi_core.hosts.transformers.window_layers import WindowLayer
from sfi_core.machine.private import attention_implementation
from sfi_kernels.partial_attention import combine, partial_attention

NAME = "sfi"
KNOWN = {  # from "position_ids" on they do not change the attention of a decoder
    "softcap", "s_aux", "sliding_window", "is_causal",
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep", "tokenizer", "assistant_tokenizer",
}  # fmt: skip
Attended = tuple[torch.Tensor, torch.Tensor | None]

_look: ContextVar[Callable[..., Attended] | None] = ContextVar("look", default=None)
# The attention implementations of models that are or were routed through sfi, by the identity of their parts' configs:
# all that transformers tells a mask function. They outlive `routed`: another thread's pass may be on its way.
_plain: dict[int, str] = {}
_users: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()
_changing = Lock()


@contextmanager
def routed(model: PreTrainedModel) -> Iterator[None]:
    """Inside, route a model's attention through sfi; raise `UnsupportedModelError` where it cannot run under SFI.

    It differs from the model's own only where `under_way` or `looking` say so, thus in no other thread.
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
    masking_utils.AttentionMaskInterface.register(NAME, mask)
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


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Attended:
    """Attend as this thread's pass asks; arguments and results are transformers'."""
    attend_here = _look.get() or (_plain_attention(module) if under_way.get() is None else sfi_attention)
    return attend_here(module, query, key, value, *args, **kwargs)


def _plain_attention(module: torch.nn.Module) -> Callable[..., Any]:
    # what a module attends with where sfi is not installed; each of transformers' files has an eager function
    sources = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    eager = (source.eager_attention_forward for source in sources if hasattr(source, "eager_attention_forward"))
    name = _plain.get(id(module.config), "sdpa")
    plain: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, next(eager, sdpa_attention_forward))
    return plain


def mask(*args: Any, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """Make the mask for a layer's attention; arguments are those of transformers' `sdpa_mask`.

    None for the full-attention layers of a run, and for all in decoding steps: a request's tokens are those in its
    pages, and a mask would take [B, 1, T, T] bytes that nobody reads. For sliding windows in a prompt `sdpa_mask`'s,
    [B, 1, T, S] bool or None. A mask function of the model's own may differ from the causal one, where Gemma sees all
    of an image for one: `sfi_attention` then refuses its mask. Outside a run the mask is the model's own.
    """
    make: Callable[..., torch.Tensor | None] | None = sdpa_mask
    cache = None if probing() else under_way.get()
    runs = cache is not None
    if cache is not None and kwargs.get("local_size") is not None and any(layer.attends for layer in cache.windows):
        return None
    if not (runs or probing()):
        make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(_plain.get(id(config), "sdpa"))
    if make is None or (runs and kwargs.get("mask_function", causal_mask_function) is causal_mask_function):
        return None
    mask = make(*args, config=config, **kwargs)
    if runs and mask is not None and kwargs.get("local_size") is None:
        causal = sdpa_mask(*args, config=config, **{**kwargs, "mask_function": causal_mask_function})
        return None if causal is not None and torch.equal(mask, causal) else mask
    return mask


def sfi_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Attended:
    """Attend under the run's plan; layers that sfi does not manage attend as without sfi, windows in their rings.

    Arguments are transformers': query [B, H*G, T, D], key and value as `Cache.update` returned them. Returns
    the output, [B, T, H*G, E], and no weights.
    """
    cache = under_way.get() if hasattr(module, "layer_idx") else None
    managed = None if cache is None else cache.attending(module)
    _refuse_unknown(module, kwargs, managed=managed is not None and not managed[1].is_sliding)
    soft_cap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if managed is None and soft_cap is None and sinks is None:
        plain: Attended = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=kwargs.get("is_causal"),
        )  # fmt: skip
        return plain
    if managed is not None and attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} makes a mask of its own, which sfi does not know")
    if managed is not None and not query.dtype == key.dtype == value.dtype:
        types = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in (query, key, value))
        raise ConfigError(
            f"queries, keys and values must have one dtype under sfi, got {types}; leave torch.autocast, and load the "
            "model in that dtype"
        )
    ragged = None if cache is None or managed is None else cache.ragged
    if ragged is not None:
        query, key, value = map(ragged.padded, (query, key, value))
    (B, heads, T, D), H = query.shape, key.shape[1]
    query_BHGTD = query.reshape(B, H, heads // H, T, D)
    scale = D**-0.5 if scaling is None else scaling
    sink_HG = None if sinks is None else local(sinks).reshape(H, heads // H)
    if managed is not None:
        index, layer = managed
        options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "sink_HG": sink_HG}
        if isinstance(layer, WindowLayer):
            out = layer.attend(index, query_BHGTD, key, value, **options)
        else:
            run = layer.store(key, value, index)
            out = attend(run, index, query_BHGTD, new=(key, value), **options)
    else:  # PyTorch's SDPA knows neither soft caps nor learned sinks, and transformers drops them without a word
        causal = attention_mask is None and T > 1
        visible = None if attention_mask is None else attention_mask[:, :, None]
        part = partial_attention(
            query_BHGTD, key, value, scale=scale, soft_cap=soft_cap, causal=causal, visible_BHGWT=visible
        )
        out = combine([part], sink_HG).to(query_BHGTD.dtype)
    if ragged is not None:
        out = ragged.join(out)
    return out.flatten(1, 2).transpose(1, 2).contiguous(), None


def _refuse_unknown(module: torch.nn.Module, kwargs: dict[str, Any], *, managed: bool) -> None:
    name = type(module).__name__
    if unknown := sorted(name for name, value in kwargs.items() if value is not None and name not in KNOWN):
        raise UnsupportedModelError(f"{name} passes attention arguments that sfi does not know: {unknown}")
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError("attention weights do not exist under sfi; drop output_attentions")
    if managed and kwargs.get("sliding_window") is not None:
        raise UnsupportedModelError(f"{name} attends to a sliding window, but its cache keeps every token")
    if kwargs.get("is_causal") is False:
        raise UnsupportedModelError(f"{name} attends in both directions")
