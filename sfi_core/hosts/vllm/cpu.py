"""Attention on CPUs over the layout that vLLM's cache has on GPUs: a token's key and value side by side.

vLLM's own kernels for CPUs keep the keys of a block transposed. A single key lies there in as many cache lines as it
has numbers, so that a method that reads chosen tokens moves most of the keys. Layers that sfi manages are therefore
written here, and their prompts read, by PyTorch's flash attention; `rows.RowLaunch` attends with decoding rows.
"""

import logging
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from vllm.v1.attention.backends import cpu_attn

from sfi_core.engine.layer import FEW
from sfi_kernels.compiled import fastest, why_not
from sfi_kernels.dense_attention import dense_attention

logger = logging.getLogger(__name__)


class RowImpl(cpu_attn.CPUAttentionBackendImpl):
    """vLLM's attention for CPUs, but over rows in layers that sfi `manages`."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the new tokens' rows; padding, -1, goes to block 0, which vLLM gives to nobody."""
        if not self.manages:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        place_X, N = slot_mapping[: len(key)].clamp_min(0), kv_cache.shape[2]
        kv_cache[place_X // N, :, place_X % N] = torch.cat((key, value), 2)[: len(place_X)]

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attend causally with the queries of a batch, [tokens, heads, D], to what is cached of their requests."""
        if not self.manages or attn_metadata is None:
            whole: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return whole
        say_by_what()
        H, (*_, heads, D) = self.num_kv_heads, query.shape
        (key_PHND, value_PHNE), options = self.pages(kv_cache), self.logit_options
        for row, (start, stop) in enumerate(pairwise(attn_metadata.query_start_loc.tolist())):
            if start < stop:
                where = (x[row : row + 1] for x in (attn_metadata.block_table, attn_metadata.seq_lens))
                query_1HGWD = query[start:stop].view(-1, H, heads // H, D).permute(1, 2, 0, 3)[None]
                by = fastest("torch", query.device, key_PHND, value_PHNE) if stop - start <= FEW else "torch"
                out_1HGWE = dense_attention.on(by)(query_1HGWD, key_PHND, value_PHNE, *where, **options)
                output[start:stop] = out_1HGWE[0].permute(2, 0, 1, 3).reshape(output[start:stop].shape)
        return output


@cache
def say_by_what() -> None:
    """Log once what a process's decoding rows are computed by."""
    why = why_not()
    if why:
        logger.warning("sfi attends in PyTorch's operators, slower than in loops that numba compiles: %s", why)
    else:
        logger.info("sfi attends in loops that numba compiles: the first steps on a machine wait for that")
