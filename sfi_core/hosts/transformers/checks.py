"""What `slow_fast` refuses: backends, caches, padding and generation modes that it cannot run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sfi_core.errors import BackendError, ConfigError, InputError
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_kernels.launch import KernelLimitError, check_device

BACKENDS = ("auto", "torch", "triton")
# by setting: what it asks for, and the values that ask for nothing
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "num_beams": ("beam search", (None, 1)),
    "constraints": ("constrained beam search", (None,)),
    "force_words_ids": ("constrained beam search", (None,)),
    "assistant_model": ("assisted decoding", (None,)),
    "assistant_early_exit": ("assisted decoding", (None,)),
    "use_mtp": ("multi-token prediction", (None, False)),
    "prompt_lookup_num_tokens": ("prompt-lookup decoding", (None,)),
    "penalty_alpha": ("contrastive search", (None, 0)),
    "dola_layers": ("DoLa decoding", (None,)),
    "guidance_scale": ("classifier-free guidance", (None, 1)),
    "cache_implementation": ("another cache", (None, "hybrid")),  # transformers drops "hybrid" too
    "custom_generate": ("a custom generate", (None,)),
    "output_attentions": ("reading attention weights", (None, False)),
}


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that is unknown or cannot run on a device at all.

    Raises:
        ConfigError: Unknown.
        BackendError: Known, but not runnable there.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}; expected one of {BACKENDS}")
    if backend == "triton":
        try:
            check_device(device)
        except KernelLimitError as error:
            raise BackendError(str(error)) from error


def check_dense_layers(asked: Sequence[int], layers: Sequence[int]) -> None:
    """Refuse to leave a layer dense that SFI does not act on: it would have no effect.

    Raises:
        ConfigError: With the layers that there are.
    """
    if unknown := sorted(set(asked) - set(layers)):
        raise ConfigError(
            f"dense_layers must be among the full-attention layers {list(layers)}, got {unknown}"
        )


def prompt_tokens(mask: Any, batch: int, new: int, seen: int, *, final: bool) -> list[int]:
    """Count each request's own tokens among the `new` ones of a padded batch.

    Raises:
        ConfigError: The mask is not two-dimensional, or pads elsewhere than on the left.
        InputError: A prompt is over and was padding only.
    """
    if mask is None:
        return [new] * batch
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:  # noqa: PLR2004
        raise ConfigError("attention_mask must be two-dimensional under sfi")
    mask = mask[:, : seen + new] != 0
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ConfigError("attention_mask must pad on the left, got padding inside or on the right")
    if final and not bool(mask[:, -1].all()):
        row = mask[:, -1].tolist().index(False)
        raise InputError(f"prompt {row} must have at least one token, got none")
    counts: list[int] = mask[:, seen:].sum(1).tolist()
    return counts


def check_cache(cache: Any, *, fresh: bool = False) -> None:
    """Refuse a cache that SFI would not act on; no cache is fine.

    Raises:
        ConfigError: It is not an sfi cache, or not a fresh one where it has to be.
    """
    if cache is None:
        return
    if not isinstance(cache, SfiCache):
        raise ConfigError(f"past_key_values must be an sfi cache, got {type(cache).__name__}")
    if fresh and cache.seen:
        raise ConfigError(f"past_key_values must be fresh, got one with {cache.seen} tokens")


def refuse_modes(settings: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse the generation modes that SFI does not run.

    Raises:
        ConfigError: With the mode's name.
    """
    for name, (what, harmless) in REFUSED.items():
        value = kwargs.get(name, getattr(settings, name, None))
        if not any(value is ok or value == ok for ok in harmless):
            shown = type(value).__name__ if hasattr(value, "forward") else repr(value)
            raise ConfigError(f"{what} does not run under sfi, got {name}={shown}")
    if settings.use_cache is False:
        raise ConfigError("use_cache must be true under sfi, got False")
