"""The private names of other packages that sfi_core uses, each because no public name says the same.

`tests/test_private_names.py` lists them, and those of the kernels, and tells when one is gone.
"""

from typing import Any

import torch


def attention_implementation(config: Any) -> str:
    """Return the attention implementation of a model's config.

    transformers documents the argument `attn_implementation` and `set_attn_implementation`, but nothing that
    reads the value back.
    """
    name: str = config._attn_implementation
    return name


def has_hooks(module: torch.nn.Module) -> bool:
    """Say whether anybody is told of a module's calls.

    PyTorch has functions to add hooks and to remove them, but none to ask for them.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks)


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Say whether oneDNN multiplies matrices of a dtype on this CPU; True for other than half precisions.

    `torch.backends.mkldnn` tells whether oneDNN is there, not what it supports.
    """
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype not in supported or bool(supported[dtype]())
