"""vLLM's attention on GPUs with sfi in front; vLLM's flags choose it, see `attention_flags`.

It has not run on a GPU.
"""

from typing import Any

from vllm.platforms import current_platform
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

from sfi_core.hosts.vllm.paged_backend import PagedBackend, PagedBuilder, PagedImpl

# FlashAttention is faster and needs compute capability 8.0 and a half precision; Triton's runs on other GPUs
_Backend: Any = TritonAttentionBackend
_Builder: Any = TritonAttentionMetadataBuilder
_Impl: Any = TritonAttentionImpl
if is_flash_attn_varlen_func_available() and current_platform.has_device_capability(80):
    _Backend, _Builder, _Impl = (FlashAttentionBackend, FlashAttentionMetadataBuilder, FlashAttentionImpl)


class SfiCudaBuilder(PagedBuilder, _Builder):
    """Makes the metadata."""


class SfiCudaImpl(PagedImpl, _Impl):
    """Attends."""


class SfiCudaBackend(PagedBackend, _Backend):
    """The backend that vLLM's registry has as `CUSTOM`."""

    @staticmethod
    def get_impl_cls() -> type[SfiCudaImpl]:
        """Return the implementation."""
        return SfiCudaImpl

    @staticmethod
    def get_builder_cls() -> type[SfiCudaBuilder]:
        """Return the builder."""
        return SfiCudaBuilder
