"""The variants that the benchmark runs: the ops on one backend, and their rivals."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from sfi_core.measure.kernel_bench import bytes_moved, gates
from sfi_core.measure.kernel_bench.codescan_variant import codescan_variant
from sfi_core.measure.kernel_bench.data import (
    Selected,
    allowed,
    evidence_logits,
    layer_data,
    norms,
    scores,
    select,
    step_plan,
)
from sfi_core.measure.kernel_bench.fused_variants import fused_variants
from sfi_core.measure.kernel_bench.prompt_variants import prompt_variants
from sfi_core.measure.kernel_bench.rivals import rivals
from sfi_core.measure.kernel_bench.settings import PACKED_OPS, KernelSettings
from sfi_core.measure.kernel_bench.step_variants import mixed_heads_variant, recall_variant, verify_variants
from sfi_core.measure.kernel_bench.variant import KernelVariant, guarded
from sfi_core.settings.parts import SelectorConfig
from sfi_kernels.append import append
from sfi_kernels.decode_attention import DecodeAttention, decode_attention
from sfi_kernels.dense_attention import dense_attention
from sfi_kernels.pack import pack
from sfi_kernels.selector import selector
from sfi_kernels.sparse_attention import sparse_attention
from sfi_kernels.step_descriptor import FAST, SLOW, StepDescriptor
from sfi_kernels.top_k import top_k

PAPER_TILE = 16  # tokens of a tile of `dense.paper_like`


class KernelVariants:
    """Builds the variants of one backend on one device."""

    def __init__(self, settings: KernelSettings, backend: str, device: torch.device) -> None:
        """Draw the inputs."""
        self.settings, self.backend, self.device = settings, backend, device
        self.notes: list[str] = []
        self._plan = partial(step_plan, settings, backend, device)
        self.data = layer_data(settings, device, one_page=backend == "torch")
        self.nothing = self.data.nothing
        self.selected: dict[float, Selected] = {}
        if PACKED_OPS & set(settings.ops):
            self.selected = {r: select(settings, self.data, r) for r in settings.retentions}

    def build(self) -> Iterator[KernelVariant]:
        """Yield the variants of the settings' ops, and dense attention for comparison.

        The caller must check a variant before it takes the next one: the check of `pack` empties the segment
        that `fast` reads. See `guarded` for a variant whose making raises.
        """
        ops, settings = self.settings.ops, self.settings
        yield from guarded("dense", 1.0, self._dense())
        verifications = verify_variants(settings, self.data, self.backend)
        yield from guarded("verify", 1.0, verifications)
        for retention, selected in self.selected.items():
            if "pack" in ops:
                yield from guarded("pack", retention, self._pack(retention, selected))
            # by the reference, so that a wrong `pack` does not make other ops wrong
            pack.reference(*self._pack_operands(selected))
            if "fast" in ops:
                yield from guarded("fast", retention, self._fast(retention, selected))
            more = settings, self.data, selected, retention, self.backend
            for op, make in (
                ("mixed_heads", mixed_heads_variant),
                ("recall", recall_variant),
                ("codescan", codescan_variant),
            ):
                if op in ops:
                    yield from guarded(op, retention, make(*more))
        if {"selector", "top_k"} & set(ops):
            yield from guarded("selector", None, self._selection())
        if "append" in ops:
            yield from guarded("append", None, self._append())
        if "prompt" in ops:
            prompts = prompt_variants(settings, self.data, self.backend, self.notes)
            yield from guarded("prompt", None, prompts)
        fused = fused_variants(settings, self.backend, self.device)
        yield from guarded("rms_norm", None, fused)

    def _dense(self) -> Iterator[KernelVariant]:
        settings, data = self.settings, self.data
        expected = gates.textbook(data.query_BHGD, data.key_BHTD, data.value_BHTD, settings.scale)
        moved = bytes_moved.attention_bytes(settings, settings.context)

        def variant(
            name: str, call: Callable[[], Any], form: str | None = None, *, rival: bool = False
        ) -> KernelVariant:
            def error() -> float:
                return expected.error(call(), rival=rival)

            return KernelVariant(name, 1.0, call, moved, error, form)

        if self.backend == "torch":
            yield variant("dense", self._dense_in_torch)
        else:
            plan = self._plan(mode=SLOW, packed=0)
            yield variant("dense", partial(self._attend, plan))
            yield self._with_evidence(plan, expected)
            one_split = self._plan(mode=SLOW, packed=0, programs=settings.kv_heads)
            yield variant("dense.paper_like", partial(self._attend, one_split, block_n=PAPER_TILE))
        if not {"fast", "dense"} & set(settings.ops):
            return
        for name, form, call in rivals(settings, data, self.notes):
            yield variant(name, call, form, rival=True)

    def _with_evidence(self, plan: StepDescriptor, expected: gates.Expected) -> KernelVariant:
        settings, data = self.settings, self.data
        call = partial(self._attend_whole, plan, evidence=True)
        moved = bytes_moved.attention_bytes(settings, settings.context, evidence=True)

        def error() -> float:
            result = call()
            assert result.logits_BHGWT is not None, "evidence was asked for"
            logits = evidence_logits(settings, data)
            differs = gates.logits_error(result.logits_BHGWT, logits, data.query_BHGD, data.key_BHTD, settings.scale)
            return max(expected.error(result.out_BHGWE[:, :, :, 0]), differs)

        return KernelVariant("dense.evidence", 1.0, call, moved, error)

    def _fast(self, retention: float, selected: Selected) -> Iterator[KernelVariant]:
        settings, data = self.settings, self.data
        start, length = settings.context - settings.recent, settings.context
        index = gates.attended(selected.index_BHK, settings.sink, start, length)
        expected = gates.textbook(data.query_BHGD, data.key_BHTD, data.value_BHTD, settings.scale, index)
        tokens = settings.attended(retention)

        def variant(name: str, call: Callable[[], Any], gathered: int = 0) -> KernelVariant:
            moved = bytes_moved.attention_bytes(settings, tokens, gathered=gathered)
            return KernelVariant(name, retention, call, moved, lambda: expected.error(call()))

        if self.backend == "torch":
            yield variant("fast", partial(self._fast_in_torch, selected))
            return
        packed = settings.sink + settings.budget(retention)
        plan = self._plan(mode=FAST, packed=packed)
        yield variant("fast", partial(self._attend, plan, selected))
        in_place = partial(self._attend, plan, selected, position_BHS=selected.position_BHS)
        yield variant("fast.gather", in_place, packed)

    def _dense_in_torch(self) -> torch.Tensor:
        data = self.data
        query = data.query_BHGD[:, :, :, None]
        return dense_attention.reference(query, *data.paged, data.length_B, scale=self.settings.scale)[:, :, :, 0]

    def _fast_in_torch(self, selected: Selected) -> torch.Tensor:
        data = self.data
        return sparse_attention.reference(
            data.query_BHGD, selected.key_BHSD, selected.value_BHSD, selected.length_BH, *data.paged,
            data.recent_start_B, data.length_B, scale=self.settings.scale,
        )  # fmt: skip

    def _attend(self, plan: StepDescriptor, *selected: Selected, **options: Any) -> torch.Tensor:
        return self._attend_whole(plan, *selected, **options).out_BHGWE[:, :, :, 0]

    def _attend_whole(self, plan: StepDescriptor, selected: Selected | None = None, **options: Any) -> DecodeAttention:
        data = self.data
        packed = self.nothing
        if selected is not None:
            packed = selected.key_BHSD, selected.value_BHSD, selected.length_BH
        attend: Callable[..., DecodeAttention] = decode_attention.triton
        query_BHG1D = data.query_BHGD[:, :, :, None]
        return attend(query_BHG1D, *packed, *data.paged, plan, scale=self.settings.scale, **options)

    def _pack_operands(self, selected: Selected) -> tuple[torch.Tensor, ...]:
        settings = self.settings
        request = torch.arange(settings.batch, dtype=torch.int32, device=self.device)
        sink = torch.full_like(request, settings.sink)
        return *self.data.paged, request, selected.index_BHK, sink, *selected.segment

    def _pack(self, retention: float, selected: Selected) -> Iterator[KernelVariant]:
        settings, data = self.settings, self.data
        rows = settings.sink + settings.budget(retention)
        call = partial(pack.on(self.backend), *self._pack_operands(selected))
        index = gates.attended(selected.index_BHK, settings.sink, 0, 0)

        def error() -> float:
            selected.poison()
            call()
            return gates.pack_error(selected.segment, data.key_BHTD, data.value_BHTD, index)

        yield KernelVariant("pack", retention, call, bytes_moved.pack_bytes(settings, rows), error)

    def _selection(self) -> Iterator[KernelVariant]:
        settings, data, ops = self.settings, self.data, self.settings.ops
        logits, options = evidence_logits(settings, data), asdict(SelectorConfig())
        norm, inside = norms(settings, data), allowed(settings, data)
        if "selector" in ops:
            log_sum = logits.masked_fill(~inside[:, None, None, None], -torch.inf).logsumexp(-1)
            call = partial(selector.on(self.backend), logits, norm, inside, log_sum_BHGW=log_sum, **options)
            moved = bytes_moved.selector_bytes(settings)

            def error() -> float:
                return gates.selector_error(call(), logits, norm, inside, options)

            yield KernelVariant("selector", None, call, moved, error)
        if "top_k" in ops:
            score = scores(settings, data, logits)
            for retention in settings.retentions:
                yield self._top_k(retention, score)

    def _top_k(self, retention: float, score: torch.Tensor) -> KernelVariant:
        K = self.settings.budget(retention)
        call = partial(top_k.on(self.backend), score, K)
        moved = bytes_moved.top_k_bytes(self.settings, K)
        return KernelVariant("top_k", retention, call, moved, lambda: gates.top_k_error(score, call()))

    def _append(self) -> Iterator[KernelVariant]:
        # appends the last token again, so that the cache stays the same
        settings, data = self.settings, self.data
        key, value = (x[:, :, -1:].clone() for x in (data.key_BHTD, data.value_BHTD))
        count = torch.ones_like(data.length_B)
        pages = data.pages
        call = partial(
            append.on(self.backend), key, value, data.length_B - 1, count,
            pages.key_PHND, pages.value_PHNE, pages.norm_PHN, data.block_table_BP,
        )  # fmt: skip
        page_size = pages.key_PHND.shape[2]
        last, offset = data.block_table_BP[:, -1].long(), (settings.context - 1) % page_size

        def error() -> float:
            for stored in (pages.key_PHND, pages.value_PHNE, pages.norm_PHN):
                stored[last, :, offset] = torch.nan
            call()
            copies = ((pages.key_PHND, key), (pages.value_PHNE, value))
            wrong = max(gates.same(to[last, :, offset], new[:, :, 0]) for to, new in copies)
            return max(wrong, gates.norm_error(pages.norm_PHN[last, :, offset], key[:, :, 0]))

        yield KernelVariant("append", None, call, bytes_moved.append_bytes(settings), error)
