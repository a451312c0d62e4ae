"""An attention backend over vLLM's cache of GPUs, `[blocks, KV heads, tokens, K|V]`, in plain torch.

It stands for FlashAttention and Triton's backend, so that what the CUDA backend adds to them runs on a CPU in
a real engine. K and V are written as `do_kv_cache_update` of vLLM's Triton backend writes them: token
`slot % N` of block `slot // N`, K in the first half of a row, V in the second.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from sfi_core.hosts.vllm.backend import PagedBackend


@dataclass
class PlainMetadata:
    """What the plain kernel needs."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class PlainBuilder(AttentionMetadataBuilder):
    """Makes it."""

    _cudagraph_support: ClassVar = AttentionCGSupport.ALWAYS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """See vLLM's."""
        common = common_attn_metadata
        return PlainMetadata(
            common.num_actual_tokens, common.query_start_loc, common.seq_lens, common.block_table_tensor
        )


class PlainImpl(AttentionImpl):
    """Attends row by row."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None = None,
        attn_type: Any = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """See vLLM's."""
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.alibi_slopes = num_kv_heads, alibi_slopes
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype, self.logits_soft_cap = kv_cache_dtype, logits_soft_cap or 0
        self.attn_type, self.sinks = attn_type, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the tokens; block 0, which nobody has, takes those without a place."""
        N, place_X = kv_cache.shape[2], slot_mapping[: len(key)].clamp_min(0)
        kv_cache[place_X // N, :, place_X % N] = torch.cat((key, value), 2)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attend causally with every row's queries to its cached tokens."""
        if attn_metadata is None:
            return output.fill_(0)
        starts = attn_metadata.query_start_loc.tolist()
        for row, length in enumerate(attn_metadata.seq_lens.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            output[tokens] = self._row(query[tokens], kv_cache, attn_metadata.block_table[row], length)
        return output

    def _row(self, query: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
        N = kv_cache.shape[2]
        blocks = kv_cache[table[: -(-length // N)].long()]  # [blocks, H, N, 2 D]
        both = blocks.transpose(1, 2).flatten(0, 1)[:length]
        key, value = both.repeat_interleave(self.num_heads // self.num_kv_heads, 1).chunk(2, 2)
        seen = torch.arange(length - len(query), length)[:, None] >= torch.arange(length)
        q, k, v = (x.transpose(0, 1).contiguous() for x in (query, key, value))
        return scaled_dot_product_attention(q, k, v, seen, scale=self.scale).transpose(0, 1)


class PlainBackend(AttentionBackend):
    """The backend without sfi."""

    supported_dtypes: ClassVar = [torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return a name that vLLM's registry has."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """See vLLM's."""
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[PlainImpl]:
        """Return the implementation."""
        return PlainImpl

    @staticmethod
    def get_builder_cls() -> type[PlainBuilder]:
        """Return the builder."""
        return PlainBuilder


class SfiPlainBackend(PagedBackend, PlainBackend):
    """As `SfiCudaBackend`, over the plain one."""
