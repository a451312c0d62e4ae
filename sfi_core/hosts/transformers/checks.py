"""What `slow_fast` refuses: models, caches, padding and generation modes."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from sfi_core.errors import ConfigError, InputError, UnsupportedModelError
from sfi_core.hosts.transformers.cache import CACHE_NAME, SfiCache
from sfi_core.models.source import HEADS, folder_of, model_digest
from sfi_core.policies import Policy
from sfi_core.policies.built_in.synckv import SyncKV
from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_pages import LayerShape

# arguments and settings of `model.generate`: other ways to decode, and what a lossless run has not
REFUSED = (
    "num_beams", "constraints", "force_words_ids", "assistant_model", "assistant_early_exit", "use_mtp",
    "prompt_lookup_num_tokens", "penalty_alpha", "dola_layers", "guidance_scale", "cache_implementation",
    "custom_generate", "output_attentions",
)  # fmt: skip
NOT_LOSSLESS = (
    "output_scores", "output_logits", "output_hidden_states", "stop_strings", "token_healing", "max_time",
    "stopping_criteria", "inputs_embeds", "position_ids", "remove_invalid_values",
)  # fmt: skip
# values that ask for nothing; transformers drops "hybrid" too
HARMLESS = {"num_beams": 1, "penalty_alpha": 0, "guidance_scale": 1, "cache_implementation": "hybrid"}

# caches of layers that sfi knows, by name, since not every release has all of them
KNOWN = {
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer", "DummyLayer",
}  # fmt: skip


def prompt_tokens(mask: Any, batch: int, new: int, seen: int, *, final: bool) -> list[int]:
    """Count each request's own tokens among the `new` ones of a padded batch.

    Raise `ConfigError` for a mask that is not [batch, tokens], padded on the left, `InputError` for an empty prompt.
    """
    if mask is None:
        return [new] * batch
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:  # noqa: PLR2004
        raise ConfigError("attention_mask must be two-dimensional under sfi")
    rows, width = mask.shape
    if rows not in (1, batch) or width < seen + new:
        raise ConfigError(f"attention_mask must be {batch} x {seen + new}, a row for each prompt, got {rows} x {width}")
    mask = (mask[:, : seen + new] != 0).expand(batch, -1)
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ConfigError("attention_mask must pad on the left, got padding inside or on the right")
    if final and not bool(mask[:, -1].all()):
        row = mask[:, -1].tolist().index(False)
        raise InputError(f"prompt {row} must have at least one token, got none")
    counts: list[int] = mask[:, seen:].sum(1).tolist()
    return counts


def check_cache(cache: Any) -> None:
    """Raise `ConfigError` for a cache that is not sfi's."""
    if cache is not None and not isinstance(cache, SfiCache):
        way = "leave it out, or take run.cache() inside slow_fast(...) as run"
        raise ConfigError(f"{CACHE_NAME} must be an sfi cache, got {type(cache).__name__}; {way}")


def refuse_modes(settings: Any, kwargs: Mapping[str, Any], *, lossless: bool) -> None:
    """Raise `ConfigError` for arguments of `model.generate` that do not run under sfi, or not losslessly."""
    for name in REFUSED + (NOT_LOSSLESS if lossless else ()):
        value = kwargs.get(name, getattr(settings, name, None))
        if not (value is None or value is False or value == [] or value == HARMLESS.get(name)):
            where = "under sfi" if name in REFUSED else "in a lossless run"
            shown = repr(value) if isinstance(value, int | float | str) else type(value).__name__
            raise ConfigError(f"{name} must be left out {where}, got {shown}")
    if settings.use_cache is False:
        raise ConfigError("use_cache must be true under sfi, got False")


def check_supported(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError`, with the architecture and the reason, where SFI cannot act."""
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; sfi runs decoder-only models")
    if not (model.is_backend_compatible() or model.get_correct_attn_implementation(None) == "sdpa"):
        raise UnsupportedModelError(f"{name} does not use transformers' attention interface")
    # all of them have one, whatever their cache looks like to this release of transformers
    kinds_of_module = {type(module).__name__ for module in model.modules()}
    if indexers := sorted(kind for kind in kinds_of_module if kind.endswith("Indexer")):
        raise UnsupportedModelError(
            f"{name} is natively sparse: its {indexers[0]} already chooses what a token attends to"
        )
    text = config.get_text_config(decoder=True)
    try:
        layers = DynamicCache(config=text).layers
    except AttributeError as error:
        raise UnsupportedModelError(f"{name} leaves nothing for sfi to do: its config lists no layers") from error
    except KeyError as error:
        kinds = getattr(text, "layer_types", None) or []
        raise UnsupportedModelError(
            f"{name} has layers that no cache of transformers {transformers.__version__} is for: layer "
            f"{kinds.index(error.args[0])} is of type {error.args[0]!r}"
        ) from error
    for index, layer in enumerate(layers):
        if (kind := type(layer).__name__) not in KNOWN:
            raise UnsupportedModelError(f"{name} has a layer that sfi does not know: layer {index} is cached as {kind}")
    if not any(isinstance(layer, DynamicLayer) and not layer.is_sliding for layer in layers):
        attends = any(isinstance(layer, DynamicLayer) for layer in layers)
        why = "every layer attends to a sliding window" if attends else "its config lists no attention layers"
        raise UnsupportedModelError(f"{name} leaves nothing for sfi to do: {why}")


def with_head_file(config: SfiConfig, policy: str, model: Any) -> SfiConfig:
    """Return settings with the head file of the model's folder, where synckv names no other."""
    folder = folder_of(model)
    if policy != "synckv" or config.synckv.heads is not None or folder is None:
        return config
    file = folder / HEADS
    return config.replace(synckv={"heads": str(file)}) if file.is_file() else config


def check_heads(policy: Policy, shapes: list[LayerShape], model: Any, ranks: int) -> None:
    """Raise `ConfigError` for head clusters of another model, and for mixed heads on several ranks."""
    if policy.mixes_heads and ranks > 1:
        raise ConfigError(f"policies whose KV heads differ (synckv) must run on one rank, got {ranks}")
    if not isinstance(policy, SyncKV):
        return
    heads = {layer: shape.heads for layer, shape in enumerate(shapes) if shape.window is None}
    if policy.clusters is not None:
        policy.clusters.check(heads, model_digest(model))
    for layer, count in heads.items():
        policy.leaders(layer, count)
