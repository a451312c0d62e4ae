"""The names of vLLM's attention on GPUs that the plugin uses; `names` has the others.

Any machine can import them. vLLM has two backends that fit: FlashAttention is faster and needs a GPU of
compute capability 8.0 and a half precision; Triton's runs on the others.
"""

from typing import Any

from vllm.config import get_current_vllm_config as current_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = ["AttentionCGSupport", "AttentionType", "KVCacheLayout", "bases", "current_config"]


def bases() -> tuple[Any, Any, Any]:
    """Return vLLM's backend for this machine, its builder and its implementation."""
    if is_flash_attn_varlen_func_available() and current_platform.has_device_capability(80):
        return FlashAttentionBackend, FlashAttentionMetadataBuilder, FlashAttentionImpl
    return TritonAttentionBackend, TritonAttentionMetadataBuilder, TritonAttentionImpl
