"""vLLM's CPU attention with sfi in front.

On a CPU vLLM's platform always takes its own backend, so this one replaces that; without our connector it is
vLLM's, unchanged.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from sfi_core.hosts.vllm.paged_backend import PagedBuilder, PagedImpl

LAYOUTS = ("vec", "vec16")  # keys of a block lie transposed, values as they are


class SfiCpuBuilder(PagedBuilder, CPUAttentionMetadataBuilder):
    """Makes the metadata, and chooses a layout of the cache that torch can read."""

    reorder_batch_threshold = CPUAttentionMetadataBuilder.reorder_batch_threshold
    supports_update_block_table = CPUAttentionMetadataBuilder.supports_update_block_table

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self._sfi and self.isa not in LAYOUTS:
            self.isa: str = "vec" if self.block_size % 32 == 0 else "vec16"
            self._set_isa_to_layers(layer_names)


class SfiCpuBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our implementation and builder."""

    @staticmethod
    def get_impl_cls() -> type["SfiCpuImpl"]:
        """Return the implementation."""
        return SfiCpuImpl

    @staticmethod
    def get_builder_cls() -> type[SfiCpuBuilder]:
        """Return the builder."""
        return SfiCpuBuilder


class SfiCpuImpl(PagedImpl, CPUAttentionBackendImpl):
    """Attends; 0 and less stand for no sliding window."""

    @property
    def sees_all(self) -> bool:
        """See `PagedImpl`."""
        return bool(self.sliding_window <= 0)

    def pages(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View a layer's cache as keys and values, [blocks, H, tokens, D]; the keys' last stride is not 1."""
        P, H, N, width = kv_cache.shape
        D = width // 2
        key, value = kv_cache.view(P, H, 2 * N, D).chunk(2, dim=2)
        return key.view(P, H, D, N).transpose(2, 3), value
