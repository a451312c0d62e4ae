"""vLLM's CPU attention with sfi in front.

On a CPU vLLM's platform always takes its own backend, so this one replaces that; without our connector it is
vLLM's, unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from sfi_core.hosts.vllm.room import Room, is_configured
from sfi_core.hosts.vllm.worker import MatchedPass, Row, WorkerEngine

LAYOUTS = ("vec", "vec16")  # keys of a block lie transposed, values as they are


@dataclass
class SfiCpuMetadata(CPUAttentionMetadata):
    """vLLM's metadata, and that of the rows that vLLM's own kernel computes.

    `build_part` makes the metadata of some rows, given their places, tokens and lengths; `part` is that of
    the rows for vLLM's kernel with the places of their tokens, None before they are known.
    """

    build_part: Callable[[Sequence[int], Sequence[Row], torch.Tensor], Any] | None = None
    part: tuple[Any, torch.Tensor] | None = None


class SfiCpuBuilder(CPUAttentionMetadataBuilder):
    """Chooses a layout of the cache that torch can read."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._sfi = is_configured(vllm_config)
        if self._sfi and self.isa not in LAYOUTS:
            self.isa: str = "vec" if self.block_size % 32 == 0 else "vec16"
            self._set_isa_to_layers(layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build vLLM's metadata, from which the metadata of some rows can be built later."""
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._sfi:
            return made
        return SfiCpuMetadata(
            **vars(made), build_part=partial(self._build_part, common_attn_metadata)
        )

    def _build_part(
        self, common: Any, places: Sequence[int], rows: Sequence[Row], token_Y: torch.Tensor
    ) -> Any:
        starts = torch.tensor([0, *(row.count for row in rows)], dtype=torch.int32).cumsum(0).int()
        place_R = torch.tensor(places)
        part = replace(
            common,
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=common.seq_lens[place_R],
            num_reqs=len(rows),
            num_actual_tokens=len(token_Y),
            max_query_len=max(row.count for row in rows),
            max_seq_len=max(row.length for row in rows),
            block_table_tensor=common.block_table_tensor[place_R].contiguous(),
            slot_mapping=common.slot_mapping[token_Y],
        )
        return super().build(0, part)


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


class SfiCpuImpl(Room, CPUAttentionBackendImpl):
    """Attends with sfi in planned passes of full-attention layers, and as vLLM does elsewhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        decodes = self.attn_type == AttentionType.DECODER
        self.serve(get_current_vllm_config(), whole=decodes and self.sliding_window <= 0)

    def pages(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View a layer's cache as keys and values, [blocks, H, tokens, D]; the keys' last stride is not 1."""
        P, H, N, width = kv_cache.shape
        D = width // 2
        key, value = kv_cache.view(P, H, 2 * N, D).chunk(2, dim=2)
        return key.view(P, H, D, N).transpose(2, 3), value

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attend with the batch's queries, [tokens, heads, D]."""
        engine = None if attn_metadata is None else self.engine_of(layer, planned=True)
        if engine is None:
            whole: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return whole
        one = engine.entered or engine.enter(
            rows_of(attn_metadata, engine), attn_metadata.block_table
        )
        if len(one.whole) == len(one.rows):
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        elif one.whole:
            part, token_Y = part_of(attn_metadata, one)
            own = output.new_empty(len(token_Y), *output.shape[1:])
            super().forward(layer, query[token_Y], key, value, kv_cache, part, own, *args, **kwargs)
            output[token_Y] = own
        self.attend_rows(engine, layer, query, output, attn_metadata.num_actual_tokens)
        return output


def rows_of(metadata: Any, engine: WorkerEngine) -> list[Row]:
    """List the rows of a batch, whose numbers are on the host."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    N = engine.store.page_size
    return [
        Row(first, last - first, length, int(metadata.block_table[place, (length - 1) // N]))
        for place, (first, last, length) in enumerate(
            zip(starts, starts[1:], lengths, strict=False)
        )
    ]


def part_of(metadata: Any, one: MatchedPass) -> tuple[Any, torch.Tensor]:
    """Return metadata and tokens of the rows that vLLM's kernel computes; made once a pass."""
    if metadata.part is None:
        rows = [one.rows[place][0] for place in one.whole]
        token_Y = torch.cat([torch.arange(r.first, r.first + r.count) for r in rows])
        metadata.part = metadata.build_part(one.whole, rows, token_Y), token_Y
    whole: tuple[Any, torch.Tensor] = metadata.part
    return whole
