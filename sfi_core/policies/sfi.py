"""Slow-Fast Inference (Xie et al., 2026): refresh the selected memory at sentence boundaries.

Two extensions of our own, both off by default. `correction` is FreeKV's fine-grained correction between
boundaries: on a fast step a KV head whose query has moved away from the one that selected for it reads
everything and selects alone. `representatives` are SyncKV's R-heads at slow steps: one head of each cluster
reads everything and selects for the cluster.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from sfi_core.policies.base import EvidencePolicy, Rule, Selection
from sfi_core.policies.context import Evidence, LayerContext
from sfi_core.policies.freekv import pooled_cosine
from sfi_core.policies.leaders import Leaders, columns, mask_of, places_of
from sfi_core.policies.shared import Triggered
from sfi_core.settings.config import SfiConfig
from sfi_kernels.selector import pool_by_page, selector
from sfi_kernels.top_k import top_k


class SFI(EvidencePolicy, Triggered):
    """Slow at a boundary or after `t_max` fast steps; the Selector refreshes the memory then."""

    def __init__(self, config: SfiConfig, trigger: Rule, layers: Sequence[int] = ()) -> None:
        """See `Policy`."""
        super().__init__(config, trigger, layers)
        self._settings = dataclasses.asdict(self.config.selector)
        source = self.config.representatives
        self.leaders = None
        if source is not None:
            count = self.config.synckv.representatives
            self.leaders = Leaders(source, "representatives", count)
        self.corrects = self.config.correction is not None
        self.mixes_heads = self.corrects or self.leaders is not None
        self.needs_only_evidence = not self.mixes_heads

    def resident_heads(self, layer: int, heads: int) -> Sequence[int]:
        """Keep the representatives' keys and values on the device."""
        own = super().resident_heads(layer, heads)
        return own or (sorted(set(self.leaders.of(layer, heads))) if self.leaders else ())

    def select_after(self, context: Evidence) -> Selection:
        """Run the Selector and keep its best positions (Algorithm 2)."""
        if self.leaders is None:
            return self._select(context, self._settings)
        chosen, place = places_of(self.leaders.of(context.layer, context.key_norm_BHT.shape[1]))
        own = self._select(_of(context, chosen), self._settings)
        diagnostics = {name: columns(value, place) for name, value in own.diagnostics.items()}
        return Selection(columns(own.index_BHK, place), diagnostics)

    def dense_heads(self, context: LayerContext) -> torch.Tensor:
        """Name the representatives on slow steps, and on fast ones the heads whose query has moved."""
        B, H = context.key_norm_BHT.shape[:2]
        slow_BH = context.key_norm_BHT.new_ones(B, H, dtype=torch.bool)
        if self.leaders is not None:
            slow_BH = mask_of(self.leaders.of(context.layer, H), context.key_norm_BHT)
        fast_BH = self._moved(context) if self.corrects else torch.zeros_like(slow_BH)
        slow = [state.slow for state in context.states]
        return torch.stack([(slow_BH if one else fast_BH)[at] for at, one in enumerate(slow)])

    def select_alone(self, context: LayerContext, heads_BH: torch.Tensor) -> Selection:
        """Select for the heads whose query has moved, each alone: without the exclusivity across heads."""
        settings = {**self._settings, "alpha_cross": 0.0}
        moved = {"query_cosine": self._cosine(context)}
        self._note(context, heads_BH)
        if context.backend != "torch":  # which heads these are is known on the device alone
            own = self._select(context, settings)
            return Selection(own.index_BHK, {**own.diagnostics, **moved}, heads_BH)
        heads = heads_BH[0].nonzero()[:, 0].tolist()
        own = self._select(_of(context, heads), settings)
        place = [heads.index(head) if head in heads else 0 for head in range(heads_BH.shape[1])]
        diagnostics = {name: columns(value, place) for name, value in own.diagnostics.items()}
        return Selection(columns(own.index_BHK, place), {**diagnostics, **moved}, heads_BH)

    def selected(self, context: LayerContext) -> None:
        """Note the query that has selected, for the correction."""
        self._note(context, None)

    def pooled(self, score_BHT: torch.Tensor) -> torch.Tensor:
        """Score whole pages, where the run selects pages."""
        return pool_by_page(score_BHT, self.config.page_size)

    def _moved(self, context: LayerContext) -> torch.Tensor:
        least = self.config.correction
        assert least is not None, "only a policy that corrects asks"
        return self._cosine(context) < least

    @staticmethod
    def _cosine(context: LayerContext) -> torch.Tensor:
        # of this step's query with the one that has selected
        query_BHGD = context.query_BHGWD[:, :, :, -1]
        last = [note.get("query", own) for note, own in zip(context.notes, query_BHGD, strict=True)]
        return pooled_cosine(query_BHGD, torch.stack(last))

    def _note(self, context: LayerContext, heads_BH: torch.Tensor | None) -> None:
        for at, (note, query_HGWD) in enumerate(
            zip(context.notes, context.query_BHGWD, strict=True)
        ):
            query_HGD = query_HGWD[:, :, -1]
            if heads_BH is not None:
                query_HGD = query_HGD.where(
                    heads_BH[at, :, None, None], note.get("query", query_HGD)
                )
            note["query"] = query_HGD.clone()

    def _select(self, context: Evidence, settings: dict[str, Any]) -> Selection:
        diagnostics: dict[str, torch.Tensor] = {}
        with context.span("selector"):
            score, diagnostics["lambda_star"] = selector.on(context.backend)(
                context.logits(),
                context.key_norm_BHT,
                context.allowed_BT,
                span=self.config.span,
                log_sum_BHGW=context.log_sum_BHGW,
                diagnostics=diagnostics if context.wants_diagnostics else None,
                gather=context.ranks.gather if context.ranks.size > 1 else None,
                interval=context.interval,
                **settings,
            )
            if self.config.granularity == "page":
                score = self.pooled(score)
        with context.span("top_k"):
            index = top_k.on(context.backend)(score, self.config.budget)
        return Selection(index, diagnostics)


def _of(context: Evidence, heads: list[int]) -> Evidence:
    # what some heads alone have seen
    log_sum = context.log_sum_BHGW
    return dataclasses.replace(
        context,
        logits=lambda: columns(context.logits(), heads),
        key_norm_BHT=columns(context.key_norm_BHT, heads),
        log_sum_BHGW=None if log_sum is None else columns(log_sum, heads),
    )
