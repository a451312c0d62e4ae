"""The one file that plugs into transformers: an attention function, a mask function and a `Cache`.

A layer calls `Cache.update(keys, values)` and then the attention function with what it made of the result.
`SfiLayer.update` hands the new keys straight back; `sfi_attention` puts what arrives there, heads expanded,
into the run's pages. A layer whose keys never arrive is refused instead of running silently dense.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sfi_core.errors import UnsupportedModelError
from sfi_core.layer_step import LayerStep
from sfi_core.run import Run
from sfi_kernels.partial_attention import combine, partial_attention

NAME = "sfi"
# what models pass along that does not change the attention of a decoder, besides `HANDLED`
HARMLESS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "logits_to_keep",
}
HANDLED = {"softcap", "s_aux", "sliding_window", "is_causal"}


class SfiLayer(CacheLayerMixin):
    """A full-attention layer's place in the cache; the keys themselves live in the run's pages."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.seen = 0
        self.run: Run | None = None
        self.pending = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note dtype and device, as transformers expects of a layer."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the new keys back, to be stored when they arrive at `sfi_attention`.

        Multi-head latent attention passes its latents here and expands them afterwards.
        """
        if self.run is None:
            raise UnsupportedModelError("an sfi cache works inside slow_fast(...) only")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[2]
        self.pending = True
        return key_states, value_states

    def store(self, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor) -> Run:
        """Put what the layer attends with into the run's pages.

        Raises:
            UnsupportedModelError: The layer did not go through `update` first.
        """
        if self.run is None or not self.pending:
            raise UnsupportedModelError(f"layer {self.index} attends without updating its cache")
        self.pending = False
        self.run.append(self.index, key_BHTD, value_BHTE)
        return self.run

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the padded length after the update, and no offset."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Return the padded length, which transformers counts in."""
        return self.seen

    def get_max_length(self) -> int:
        """Return that there is no maximum."""
        return -1

    def reset(self) -> None:
        """Refuse: a run has one prompt."""
        raise UnsupportedModelError("an sfi cache cannot be reset; make a new one")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refuse: beam search would move a request's state."""
        raise UnsupportedModelError("beam search does not run under sfi; use num_beams=1")


class SfiCache(Cache):
    """transformers' view of a run: `SfiLayer` for full attention, transformers' own for sliding windows.

    Attributes:
        capacity: Tokens a request may reach, when known; the pages are allocated once for that many.
        prompt_length: Padded prompt tokens, when known; a piece that ends before them is not step 0.
        stop_ids: Tokens that end a request.
        run: Made at the first forward pass, when the batch is known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int | None,
        prompt_length: int | None,
        stop_ids: frozenset[int],
    ) -> None:
        base = DynamicCache(config=model.config.get_text_config(decoder=True))
        super().__init__(
            layers=[
                SfiLayer(index) if type(layer) is DynamicLayer else layer
                for index, layer in enumerate(base.layers)
            ]
        )
        self.capacity, self.prompt_length, self.stop_ids = capacity, prompt_length, stop_ids
        self.run: Run | None = None

    @property
    def managed(self) -> list[SfiLayer]:
        """The full-attention layers."""
        return [layer for layer in self.layers if isinstance(layer, SfiLayer)]

    @property
    def seen(self) -> int:
        """Padded tokens so far."""
        return self.managed[0].seen

    def attach(self, run: Run) -> Self:
        """Give the layers their run, for a forward pass."""
        self.run = run
        for layer in self.managed:
            layer.run = run
        return self

    def detach(self) -> None:
        """Take the run from the layers, which refuse keys until the next pass under a session.

        Raises:
            UnsupportedModelError: Keys of the last pass did not reach `sfi_attention`.
        """
        for layer in self.managed:
            layer.run = None
        missed = [layer.index for layer in self.managed if layer.pending]
        if missed:
            raise UnsupportedModelError(
                f"layers {missed} do not attend through transformers' attention interface; "
                "sfi would not act on them"
            )


@dataclass(slots=True)
class Seam:
    """What a model's attention modules hold while it is installed.

    Attributes:
        cache: The sfi cache of the forward pass under way; None when it runs without one.
    """

    cache: SfiCache | None = None


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
    """Attend under the run's plan; layers and calls outside a run attend as they always do.

    Args are transformers': query [B, H*G, T, D], key and value as `Cache.update` returned them.

    Returns:
        out, [B, T, H*G, E], and no weights.
    """
    cache: SfiCache | None = getattr(module, "sfi_seam", Seam()).cache
    layer = cache.layers[module.layer_idx] if cache is not None else None
    layer = layer if isinstance(layer, SfiLayer) else None
    _refuse_unknown(module, kwargs, managed=layer is not None)
    B, heads, T, D = query.shape
    H = key.shape[1]
    scale = D**-0.5 if scaling is None else scaling
    query_BHGTD = query.reshape(B, H, heads // H, T, D)
    sinks = kwargs.get("s_aux")
    options = {
        "soft_cap": kwargs.get("softcap"),
        "sink_HG": None if sinks is None else sinks.reshape(H, heads // H),
    }
    if layer is not None:
        run = layer.store(key, value)
        out = LayerStep(run, layer.index, scale=scale, **options).attend(query_BHGTD)
    elif options["soft_cap"] is None and sinks is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=kwargs.get("is_causal"),
        )  # fmt: skip
        return plain
    else:
        out = _unmanaged(query_BHGTD, key, value, attention_mask, scale, **options)
    return out.reshape(B, heads, T, -1).transpose(1, 2).contiguous(), None


def _unmanaged(
    query_BHGTD: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    sink_HG: torch.Tensor | None,
) -> torch.Tensor:
    # PyTorch's SDPA knows neither soft caps nor learned sinks, and transformers drops them without a word
    T = query_BHGTD.shape[3]
    causal = mask is None and T > 1
    visible = None if mask is None else mask[:, :, None]
    part = partial_attention(
        query_BHGTD,
        key,
        value,
        scale=scale,
        soft_cap=soft_cap,
        causal=causal,
        visible_BHGWT=visible,
    )
    return combine([part], sink_HG).to(query_BHGTD.dtype)


def _refuse_unknown(module: torch.nn.Module, kwargs: dict[str, Any], *, managed: bool) -> None:
    given = {name for name, value in kwargs.items() if value is not None}
    unknown = sorted(given - HARMLESS - HANDLED)
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes attention arguments that sfi does not know: {unknown}"
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError(
            "attention weights do not exist under sfi; drop output_attentions"
        )
    if managed and kwargs.get("sliding_window") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to a sliding window, but its cache keeps every token"
        )
    if kwargs.get("is_causal") is False:
        raise UnsupportedModelError(f"{type(module).__name__} attends in both directions")


def install(model: PreTrainedModel, seam: Seam) -> str:
    """Route a model's attention through sfi.

    Returns:
        The attention implementation it had, for `uninstall`.

    Raises:
        UnsupportedModelError: The architecture cannot run under SFI.
    """
    check_supported(model)
    AttentionInterface.register(NAME, sfi_attention)
    AttentionMaskInterface.register(
        NAME, sdpa_mask
    )  # without one, padding would be ignored silently
    previous: str = model.config._attn_implementation  # noqa: SLF001 - nothing public says it
    model.set_attn_implementation(NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:  # noqa: SLF001
        model.set_attn_implementation(previous)
        raise UnsupportedModelError(
            f"{type(model).__name__} does not use transformers' attention interface"
        )
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.sfi_seam = seam
    return previous


def uninstall(model: PreTrainedModel, previous: str) -> None:
    """Give a model its own attention back."""
    for module in model.modules():
        module.__dict__.pop("sfi_seam", None)
    model.set_attn_implementation(previous)


def check_supported(model: PreTrainedModel) -> None:
    """Refuse what SFI cannot act on.

    Raises:
        UnsupportedModelError: With the architecture's name and the reason.
    """
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model; sfi runs decoder-only models"
        )
    if not (model._supports_attention_backend or model._supports_sdpa):  # noqa: SLF001
        raise UnsupportedModelError(f"{name} does not use transformers' attention interface")
    text = config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        raise UnsupportedModelError(f"{name} has chunked attention layers, which sfi does not know")
    layers = DynamicCache(config=text).layers
    kinds = {type(layer) for layer in layers}
    if odd := sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer}):
        raise UnsupportedModelError(f"{name} has layers that sfi does not know, cached as {odd}")
    if DynamicLayer not in kinds:
        why = (
            "every layer attends to a sliding window"
            if layers
            else "its config lists no attention layers"
        )
        raise UnsupportedModelError(f"{name} leaves nothing for sfi to do: {why}")
    if shared := text.num_hidden_layers - len(layers):
        raise UnsupportedModelError(
            f"{name} has {shared} layers that read another layer's keys, which sfi does not know"
        )
