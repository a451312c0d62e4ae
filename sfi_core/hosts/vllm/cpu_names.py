"""The names of vLLM's CPU attention that the plugin uses; `names` has the others."""

from vllm.config import get_current_vllm_config as current_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

__all__ = [
    "AttentionType", "CPUAttentionBackend", "CPUAttentionBackendImpl", "CPUAttentionMetadata",
    "CPUAttentionMetadataBuilder", "current_config",
]  # fmt: skip
