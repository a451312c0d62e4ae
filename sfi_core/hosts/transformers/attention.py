"""Plug sfi into transformers: an attention function, a mask function, and a `Cache`.

A layer calls `Cache.update(keys, values)`, then the attention function with the result. `SfiLayer.update`
returns the new keys unchanged; `sfi_attention` stores them, heads expanded, in the run's pages. A layer whose
keys never arrive is refused: it would run dense without a word.
"""

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from sfi_core.distributed.ranks import local
from sfi_core.engine.backends.registry import attend
from sfi_core.errors import UnsupportedModelError
from sfi_core.hosts.transformers.cache import Seam
from sfi_core.hosts.transformers.checks import check_supported
from sfi_core.machine.private import attention_implementation
from sfi_kernels.partial_attention import combine, partial_attention

NAME = "sfi"
HANDLED = {"softcap", "s_aux", "sliding_window", "is_causal"}
KNOWN = HANDLED | {  # the others do not change the attention of a decoder
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep", "tokenizer", "assistant_tokenizer",
}  # fmt: skip


def sfi_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend under the run's plan; layers and calls outside a run attend as without sfi.

    Arguments are transformers': query [B, H*G, T, D], key and value as `Cache.update` returned them. Returns
    the output, [B, T, H*G, E], and no weights.
    """
    seam: Seam | None = getattr(module, "sfi_seam", None)
    cache = None if seam is None else seam.cache
    managed = None if cache is None else cache.attending(module)
    _refuse_unknown(module, kwargs, managed=managed is not None)
    if managed is not None and attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} makes a mask of its own, which sfi does not know")
    ragged = cache.ragged if cache is not None and managed is not None else None
    if ragged is not None:
        query, key, value = map(ragged.spread, (query, key, value))
    B, heads, T, D = query.shape
    H = key.shape[1]
    scale = D**-0.5 if scaling is None else scaling
    query_BHGTD = query.reshape(B, H, heads // H, T, D)
    sinks = None if kwargs.get("s_aux") is None else local(kwargs["s_aux"])
    options: dict[str, Any] = {
        "soft_cap": kwargs.get("softcap"),
        "sink_HG": None if sinks is None else sinks.reshape(H, heads // H),
    }
    if managed is not None:
        index, layer = managed
        run = layer.store(key, value, index)
        out = attend(run, index, query_BHGTD, scale=scale, new=(key, value), **options)
    elif options["soft_cap"] is None and sinks is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=kwargs.get("is_causal"),
        )  # fmt: skip
        return plain
    else:
        out = _unmanaged(query_BHGTD, key, value, attention_mask, scale, **options)
    if ragged is not None:
        out = ragged.join(out)
    return out.flatten(1, 2).transpose(1, 2).contiguous(), None


def _unmanaged(
    query_BHGTD: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scale: float, soft_cap: float | None, sink_HG: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    # PyTorch's SDPA knows neither soft caps nor learned sinks, and transformers drops them without a word
    T = query_BHGTD.shape[3]
    causal = mask is None and T > 1
    visible = None if mask is None else mask[:, :, None]
    part = partial_attention(
        query_BHGTD, key, value, scale=scale, soft_cap=soft_cap, causal=causal, visible_BHGWT=visible
    )
    return combine([part], sink_HG).to(query_BHGTD.dtype)


def _refuse_unknown(module: torch.nn.Module, kwargs: dict[str, Any], *, managed: bool) -> None:
    unknown = [name for name, value in kwargs.items() if value is not None and name not in KNOWN]
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes attention arguments that sfi does not know: {sorted(unknown)}"
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError("attention weights do not exist under sfi; drop output_attentions")
    if managed and kwargs.get("sliding_window") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to a sliding window, but its cache keeps every token"
        )
    if kwargs.get("is_causal") is False:
        raise UnsupportedModelError(f"{type(module).__name__} attends in both directions")


def install(model: PreTrainedModel, seam: Seam) -> str:
    """Route a model's attention through sfi; return its attention implementation, for `uninstall`.

    Raise `UnsupportedModelError` for an architecture that cannot run under SFI.
    """
    check_supported(model)
    AttentionInterface.register(NAME, sfi_attention)
    # without a mask function sliding windows would ignore padding silently
    AttentionMaskInterface.register(NAME, sfi_mask)
    previous = attention_implementation(model.config)
    model.set_attn_implementation(NAME)
    if attention_implementation(model.config.get_text_config(decoder=True)) != NAME:
        model.set_attn_implementation(previous)
        raise UnsupportedModelError(f"{type(model).__name__} does not use transformers' attention interface")
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.sfi_seam = seam
    watch(model, seam)
    return previous


def uninstall(model: PreTrainedModel, previous: str) -> None:
    """Give a model its own attention back."""
    forget(model)
    for module in model.modules():
        module.__dict__.pop("sfi_seam", None)
    model.set_attn_implementation(previous)


# by the identity of the configs that the model's parts hold: all that transformers tells a mask function
_seams: dict[int, Seam] = {}


def sfi_mask(*args: Any, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """Make the mask for a layer's attention; arguments are those of transformers' `sdpa_mask`.

    Return None for the full-attention layers of a run: a request's tokens are those in its pages, and a mask
    would take [B, 1, T, T] bytes that nobody reads. For sliding windows and calls outside a run, return
    `sdpa_mask`'s mask, [B, 1, T, S] bool or None; so too for a function of the model's own that is not the causal
    one on this text, as where Gemma sees all of an image, which `sfi_attention` refuses.
    """
    seam = _seams.get(id(config))
    plain = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    runs = seam is not None and seam.cache is not None
    if plain and runs:
        return None
    mask: torch.Tensor | None = sdpa_mask(*args, config=config, **kwargs)
    if runs and mask is not None and kwargs.get("local_size") is None:
        causal = sdpa_mask(*args, config=config, **{**kwargs, "mask_function": causal_mask_function})
        return None if causal is not None and torch.equal(mask, causal) else mask
    return mask


def watch(model: PreTrainedModel, seam: Seam) -> None:
    """Let a model's masks depend on whether its seam has a cache."""
    _seams.update(dict.fromkeys(_configs(model), seam))


def forget(model: PreTrainedModel) -> None:
    """Give a model its own masks back."""
    for config in _configs(model):
        _seams.pop(config, None)


def _configs(model: PreTrainedModel) -> set[int]:
    return {id(module.config) for module in model.modules() if hasattr(module, "config")}
