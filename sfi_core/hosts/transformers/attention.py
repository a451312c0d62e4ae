"""The attention of a pass under sfi; `routing` is how a model gets to it.

A layer calls `Cache.update(keys, values)`, then the attention function with the result. `SfiLayer.update`
returns the new keys unchanged; `sfi_attention` stores them, heads expanded, in the run's pages. A layer whose
keys never arrive is refused: it would run dense without a word.
"""

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sfi_core.distributed.ranks import local
from sfi_core.engine.attend import attend
from sfi_core.errors import ConfigError, UnsupportedModelError
from sfi_core.hosts.transformers.cache import under_way
from sfi_kernels.partial_attention import combine, partial_attention

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
    """Attend under the run's plan; layers that sfi does not manage attend as without sfi.

    Arguments are transformers': query [B, H*G, T, D], key and value as `Cache.update` returned them. Returns
    the output, [B, T, H*G, E], and no weights.
    """
    cache = under_way.get() if hasattr(module, "layer_idx") else None
    managed = None if cache is None else cache.attending(module)
    _refuse_unknown(module, kwargs, managed=managed is not None)
    if managed is not None and attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} makes a mask of its own, which sfi does not know")
    if managed is not None and not query.dtype == key.dtype == value.dtype:
        types = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in (query, key, value))
        raise ConfigError(
            f"queries, keys and values must have one dtype under sfi, got {types}; leave torch.autocast, and load the "
            "model in that dtype"
        )
    ragged = cache.ragged if cache is not None and managed is not None else None
    if ragged is not None:
        query, key, value = map(ragged.padded, (query, key, value))
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
