"""Models without a checkpoint: an architecture from its config, with random weights or none."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from sfi_core.errors import InputError, UnsupportedModelError
from sfi_core.machine.text import first_line
from sfi_core.models.load import BUNDLED, quiet, read_config, readable
from sfi_core.models.source import find_source

QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}  # fmt: skip


def _sizes(base: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
    }  # fmt: skip
    return {**base, **sizes, **more}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _sizes(QWEN3, 1024, 3072, 28, 16),
    "qwen3-4b": _sizes(QWEN3, 2560, 9728, 36, 32),
    "qwen3-8b": _sizes(QWEN3, 4096, 12288, 36, 32, tie_word_embeddings=False),
    "qwen3-30b-a3b": _sizes(
        QWEN3, 2048, 6144, 48, 32, model_type="qwen3_moe", num_key_value_heads=4, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, tie_word_embeddings=False,
    ),
    "llama-3.1-8b": _sizes(
        {"model_type": "llama"}, 4096, 14336, 32, 32, vocab_size=128256, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
    "qwen2.5-7b": _sizes(
        {"model_type": "qwen2"}, 3584, 18944, 28, 28, vocab_size=152064, num_key_value_heads=4,
        max_position_embeddings=32768, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    ),
}  # fmt: skip
SPREAD = 0.035  # uniform in +-SPREAD: a standard deviation of 0.02, as usual for new weights
BLOCK = (1 << 20) - 3  # numbers drawn once and repeated; odd, so that rows of a matrix differ


def random_config(source: str) -> Any:
    """Return the config of a name of `ARCHITECTURES` or of a config.json; raise `InputError` for others."""
    quiet()
    if source.lower() in ARCHITECTURES:
        return AutoConfig.for_model(**ARCHITECTURES[source.lower()])
    if not Path(source).is_file():
        raise InputError(f"random weights must be one of {tuple(ARCHITECTURES)} or a config file, got {source!r}")
    return model_config(source)


def model_config(source: str | None) -> Any:
    """Read the config of a model, None for the bundled one, without loading it; raise an `SfiError` as `load`."""
    quiet()
    path = str(BUNDLED if source is None else source)
    with readable(f"config of {path}", "read"):
        where = find_source(path)
        with where.opened():
            return read_config(where)


def empty_model(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Make a model with uninitialized weights, which take no memory on the meta device."""
    try:
        with no_init_weights(), device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be made without weights: {first_line(error)}"
        ) from error
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def random_model(config: Any, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """Make a model of random weights quickly: a block of numbers is repeated; norms scale by 1, biases are 0."""
    model = empty_model(config, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.rand(BLOCK, generator=generator, device=device)
    block = ((2 * drawn - 1) * SPREAD).to(dtype)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            flat = weight.view(-1)
            whole = flat.numel() // BLOCK * BLOCK
            flat[:whole].view(-1, BLOCK).copy_(block)
            flat[whole:].copy_(block[: flat.numel() - whole])
        else:
            weight.fill_(0.0 if name.endswith(("bias", "sinks")) else 1.0)
    return model
