"""Sfi in front of vLLM's attention backends for CPUs and GPUs.

The cache is vLLM's, `[blocks, KV heads, tokens, K|V]`. vLLM's kernels write keys and values, and attend with prompts;
sfi's attend with the decoding rows, over the same blocks. On a CPU `cpu` stands for vLLM's kernels; vLLM's platform
always takes its own backend, so ours replaces that; without our connector it is vLLM's, unchanged. On a GPU vLLM's
flags choose ours, see `attention_flags`; it has not run on one.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import cpu_attn, flash_attn, triton_attn
from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

from sfi_core.errors import ConfigError
from sfi_core.hosts.serving.plan import Entry, RowMatcher, last_blocks
from sfi_core.hosts.serving.worker import WorkerEngine
from sfi_core.hosts.vllm.cpu import RowImpl
from sfi_core.hosts.vllm.names import give_room, is_configured, is_full
from sfi_core.state.layer_pages import PackedSegment

Mixin: Any = object  # beside vLLM's own class, whose attributes it uses


@dataclass(slots=True)
class Batch:
    """Shared by all layers of a pass: the input of vLLM's metadata, its `CommonAttentionMetadata`.

    `rest` are the rows behind the launched ones as a batch of their own, for vLLM's kernel, and their tokens; None
    where these are all rows or none, and until the pass is entered.
    """

    common: Any
    builder: Any
    rest: tuple[Any, slice] | None = None

    @property
    def alone(self) -> int:
        """Rows of a batch of one token each, padding included, whose pass a graph may hold; 0 for another batch."""
        return int(self.common.num_reqs) if self.common.max_query_len == 1 else 0

    def enter(self, engine: WorkerEngine, entries: Sequence[Entry]) -> None:
        """Enter the pass that has been planned; rows of no tokens pad the batch at the end."""
        common, table_RP = self.common, self.common.block_table_tensor
        starts = common.query_start_loc_cpu.tolist()[: len(entries) + 1]
        lengths = common.seq_lens_cpu_upper_bound[: len(entries)].tolist()
        matched = self.builder.matcher.match(
            [(length, end - start) for length, start, end in zip(lengths, starts, starts[1:], strict=False)],
            None if common.req_idx is None else common.req_idx.tolist(),
            entries,
            lambda: last_blocks(table_RP, lengths, engine.store.page_size, engine.split),
        )
        rows = [*zip(starts, matched, strict=False)]
        engine.enter(rows, table_RP, self.alone)
        if 0 < engine.launched < len(rows):
            (first, _), (last, entry) = rows[engine.launched], rows[-1]
            tokens = slice(first, last + entry.count)
            (part,) = split_attn_metadata([UBatchSlice(slice(engine.launched, len(rows)), tokens)], common)
            self.rest = self.builder.build_part(part), tokens


class PagedBuilder(Mixin):
    """Builds vLLM's metadata, and keeps its input for the pass, which begins when the plan is known."""

    supports_update_block_table = False  # the metadata of another group is not ours

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._sfi = is_configured(vllm_config) and is_full(kv_cache_spec)
        if self._sfi:
            self.reorder_batch_threshold = 1  # rows of a token first
        self._impl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        self.matcher = RowMatcher()

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Let graphs hold decoding rows; vLLM's kernels for prompts stay outside."""
        if is_configured(vllm_config) and is_full(kv_cache_spec):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **options: Any) -> Any:
        """Build vLLM's metadata without a schedule: the rows of vLLM's kernel are not known yet."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build or self._sfi, **options)
        engine: WorkerEngine | None = getattr(self._impl, "engine", None)
        if self._sfi and engine is not None:
            metadata.sfi = batch = Batch(copy.copy(common_attn_metadata), self)
            engine.built[self] = batch.enter
            if batch.alone:
                engine.launch.rest(batch.alone)
        return metadata

    def build_part(self, common: Any) -> Any:
        """Build vLLM's metadata for a part of the batch."""
        return super().build(0, common, True)


class SfiBackend(Mixin):
    """A vLLM backend with our implementation and our builder in front of its own; `before` stands between."""

    before: tuple[type, ...] = ()

    @classmethod
    @cache
    def get_impl_cls(cls) -> Any:
        """Return the implementation, named like the backend."""
        name = cls.__name__.replace("Backend", "Impl")
        return type(name, (PagedImpl, *cls.before, super().get_impl_cls()), {})

    @classmethod
    @cache
    def get_builder_cls(cls) -> Any:
        """Return the builder."""
        return type(cls.__name__.replace("Backend", "Builder"), (PagedBuilder, super().get_builder_cls()), {})


class PagedBackend(SfiBackend):
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
    supports_kv_cache_update_bypass = False  # a part of a batch is cut out of its keys, too


class PagedImpl(Mixin):
    """Attends with sfi in planned passes of the full-attention layers that it `manages`, and as vLLM does elsewhere.

    `engine` serves the layer, from when vLLM has its cache; None in layers that sfi does not serve. `segment` is the
    layer's packed segment, None before the weights are loaded, and in dense layers; `kept` what the policy keeps there,
    `evidence` what the launch leaves for selections, if anything. `norm_X` is float32 room for the norms of the cached
    keys; None where free memory does not determine the cache's size, as on a CPU. `given` says whether `give_room` has
    run.
    """

    engine: WorkerEngine | None = None
    segment: PackedSegment | None = None
    kept: Any = None
    evidence: torch.Tensor | None = None
    norm_X: torch.Tensor | None = None
    given = False
    supports_dcp = False
    supports_pcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise `ConfigError` for ALiBi, and for keys shared between layers, where sfi manages the layer."""
        super().__init__(*args, **kwargs)
        self.vllm_config, window = get_current_vllm_config(), self.sliding_window  # on a CPU vLLM has it as a number
        whole = window == (-1, -1) if isinstance(window, tuple) else window <= 0
        self.manages = whole and self.attn_type == AttentionType.DECODER and is_configured(self.vllm_config)
        if self.manages and self.alibi_slopes is not None:
            raise ConfigError("sfi does not run in vLLM with ALiBi; leave the connector out")
        if self.manages and self.kv_sharing_target_layer_name is not None:
            raise ConfigError("sfi does not run in vLLM with layers that share keys and values")

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give all layers their room, with the first layer; weights may be loaded more than once."""
        super().process_weights_after_loading(act_dtype)
        if self.manages and not self.given:
            give_room(self.vllm_config, act_dtype)

    @property
    def logit_options(self) -> dict[str, Any]:
        """The scale, soft cap and sinks of logits, as our ops take them."""
        sink_HG = None if self.sinks is None else self.sinks.view(self.num_kv_heads, -1)
        return {"scale": self.scale, "soft_cap": self.logits_soft_cap or None, "sink_HG": sink_HG}

    def pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        engine, attend = self.engine, super().forward
        batch: Batch | None = getattr(attn_metadata, "sfi", None)
        if engine is None or batch is None or (engine.rows is None and not batch.alone):
            whole: torch.Tensor = attend(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            return whole
        if not batch.alone:
            metadata, tokens = batch.rest or (attn_metadata, slice(None))
            operands = query[tokens], key[tokens], value[tokens]
            attend(layer, *operands, kv_cache, metadata, output[tokens], *args, **kwargs)
        query_XHGD, out_XHGE = (x.view(len(x), self.num_kv_heads, -1, x.shape[-1]) for x in (query, output))
        index, table_RP = extract_layer_index(layer.layer_name), batch.common.block_table_tensor
        engine.attend(index, query_XHGD, out_XHGE, table_RP, **self.logit_options)
        return output


class SfiCpuBackend(SfiBackend, cpu_attn.CPUAttentionBackend):
    """vLLM's CPU backend with sfi, over the layout of GPUs."""

    before = (RowImpl,)


# FlashAttention is faster and needs compute capability 8.0 and a half precision; Triton's runs on other GPUs
_flash = is_flash_attn_varlen_func_available() and current_platform.has_device_capability(80)
_Backend: Any = flash_attn.FlashAttentionBackend if _flash else triton_attn.TritonAttentionBackend


class SfiCudaBackend(PagedBackend, _Backend):
    """The backend that vLLM's registry has as `CUSTOM`."""
