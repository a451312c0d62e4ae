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
QWEN3_8B = {
    **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": {
        **QWEN3_8B, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}  # fmt: skip
SPREAD = 0.035  # uniform in +-SPREAD: a standard deviation of 0.02, as usual for new weights
BLOCK = (1 << 20) - 3  # numbers drawn once and repeated; odd, so that rows of a matrix differ


def random_config(source: str) -> Any:
    """Return the config of a name of `ARCHITECTURES` or of a config.json; raise `InputError` for others."""
    quiet()
    known = ARCHITECTURES.get(source.lower())
    if known is not None:
        return AutoConfig.for_model(**known)
    if not Path(source).is_file():
        raise InputError(f"random weights must be one of {tuple(ARCHITECTURES)} or a config file, got {source!r}")
    return model_config(source)


def model_config(source: str | None) -> Any:
    """Read the config of a model without loading the model; None is the bundled model.

    Raise `InputError` for a config that is missing or damaged, `BackendError` if it needs a package that is missing.
    """
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
    """Make a model with random weights, in about the time that it takes to write them.

    A block of uniform numbers is drawn once and repeated; norms scale by 1, biases are 0. Raise
    `UnsupportedModelError` for a config that is not one of a causal language model.
    """
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
