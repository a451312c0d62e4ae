"""The attention masks of a model under sfi: none for the layers whose tokens the run counts."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask

from sfi_core.hosts.transformers.cache import Seam

# by the identity of the configs that the model's parts hold: all that transformers tells a mask function
_seams: dict[int, Seam] = {}


def sfi_mask(*args: Any, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """Make the mask for a layer's attention; arguments are those of transformers' `sdpa_mask`.

    Returns:
        None for the full-attention layers of a run: a request's tokens are those in its pages, and a mask
            would take [B, 1, T, T] bytes that nobody reads. For sliding windows and calls outside a run,
            `sdpa_mask`'s mask, [B, 1, T, S] bool or None.
    """
    seam = _seams.get(id(config))
    plain = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    if plain and seam is not None and seam.cache is not None:
        return None
    mask: torch.Tensor | None = sdpa_mask(*args, config=config, **kwargs)
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
