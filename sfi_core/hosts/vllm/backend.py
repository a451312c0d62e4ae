"""Sfi in front of vLLM's attention backends for CPUs and GPUs.

The cache is vLLM's, `[blocks, KV heads, tokens, K|V]`. vLLM's kernels write keys and values, and attend with prompts
and with requests without a slot; sfi's attend with the decoding rows that have one, over the same blocks. On a CPU
vLLM's platform always takes its own backend, so ours replaces that; without our connector it is vLLM's, unchanged. On
a GPU vLLM's flags choose ours, see `attention_flags`; it has not run on one.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
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

from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm.room import Room, is_configured
from sfi_core.hosts.vllm.rows import HostRows, Part, RowMatcher, last_blocks, part_of
from sfi_core.hosts.vllm.worker import MatchedPass, WorkerEngine


@dataclass(slots=True)
class Batch:
    """Shared by all layers of a pass, beside vLLM's metadata, of which `common` was the input.

    `entered` is the pass, once a layer has entered it; `part` are the rows that vLLM's kernel computes, None
    for all rows or none, as `entered` tells.
    """

    common: Any
    builder: Any
    entered: MatchedPass | None = None
    part: Part | None = None

    def enter(self, engine: WorkerEngine) -> MatchedPass:
        """Enter the pass with the first layer, and return it for the others."""
        if self.entered is None:
            common, table_RP = self.common, self.common.block_table_tensor
            rows = HostRows(
                common.query_start_loc_cpu.tolist(),
                common.seq_lens_cpu_upper_bound.tolist(),
                None if common.req_idx is None else common.req_idx.tolist(),
            )
            plan = engine.plan
            assert plan is not None, "the scheduler has planned the pass"
            matched = self.builder.matcher.match(
                rows, plan.entries, lambda: last_blocks(table_RP, rows, engine.store.page_size, engine.split)
            )
            self.entered = engine.enter(matched, table_RP)
            self.part = part_of(common, self.entered, self.builder.build_part)
        return self.entered


class PagedBuilder:
    """Builds vLLM's metadata, and keeps its input."""

    reorder_batch_threshold = 1  # decoding rows first, so that vLLM's part lies together
    supports_update_block_table = False  # the metadata of another group is not ours

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self._sfi = is_configured(vllm_config)
        self.matcher = RowMatcher()

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Keep attention out of CUDA graphs where sfi is on: Python decides whether a step is slow."""
        if is_configured(vllm_config):
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **options: Any) -> Any:
        """Build vLLM's metadata without a schedule: the rows of vLLM's kernel are not known yet."""
        made: Any = super().build(  # type: ignore[misc]
            common_prefix_len, common_attn_metadata, fast_build or self._sfi, **options
        )
        if self._sfi:
            made.sfi = Batch(copy.copy(common_attn_metadata), self)
        return made

    def build_part(self, common: Any) -> Any:
        """Build vLLM's metadata for a part of the batch."""
        return super().build(0, common, True)  # type: ignore[misc]


class PagedBackend:
    """A vLLM backend without the features that sfi lacks; vLLM names missing ones at start."""

    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")

    @staticmethod
    def get_name() -> str:
        """Return vLLM's name for backends of others."""
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the layout in which the tokens of a head lie together."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Serve decoders only."""
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def _no(cls) -> bool:
        return False

    supports_mm_prefix = supports_non_causal = _no  # no token attends to later ones
    supports_rswa = _no  # no layer forgets generated tokens
    supports_batch_invariance = _no  # other pieces of a prompt may change the last bits


class PagedImpl(Room):
    """Attends with sfi in planned passes of full-attention layers, and as vLLM does elsewhere."""

    attn_type: Any
    sliding_window: Any
    supports_dcp = False
    supports_pcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        decodes = self.attn_type == AttentionType.DECODER
        self.serve(get_current_vllm_config(), whole=decodes and self.sees_all)

    @property
    def sees_all(self) -> bool:
        """Whether the layer has no sliding window."""
        return bool(self.sliding_window == (-1, -1))

    def pages(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View a layer's cache, [blocks, H, tokens, K|V], as keys and values: halves of each row."""
        D = self.head_size
        *_, width = kv_cache.shape
        if width != 2 * D:
            raise ConfigError(f"a row of vLLM's cache must be a key and a value of {D} numbers, got {width}")
        return kv_cache[..., :D], kv_cache[..., D:]

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attend with the batch's queries, [tokens, heads, D]."""
        engine = self.engine_of(layer, planned=True)
        batch: Batch | None = getattr(attn_metadata, "sfi", None)
        attend = super().forward  # type: ignore[misc]
        if engine is None or batch is None:
            whole: torch.Tensor = attend(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            return whole
        entered = batch.enter(engine)
        if len(entered.whole) == len(entered.rows):
            attend(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        elif batch.part is not None:
            parts, out = batch.part.take(query, key, value), batch.part.room(output)
            attend(layer, *parts, kv_cache, batch.part.metadata, out, *args, **kwargs)
            batch.part.put(out, output)
        self.attend_rows(engine, layer, query, output, sum(row.count for row, _ in entered.rows))
        return output


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
