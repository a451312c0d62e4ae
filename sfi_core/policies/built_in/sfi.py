"""Slow-Fast Inference (Xie et al., 2026): refresh the selected memory at sentence boundaries."""

import dataclasses
from collections.abc import Sequence

import torch

from sfi_core.policies.base import Evidence, EvidencePolicy, Selection, Triggered
from sfi_core.settings.config import SfiConfig
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.compiled import fastest
from sfi_kernels.selector import pool_by_page, selector
from sfi_kernels.top_k import top_k


class SFI(EvidencePolicy, Triggered):
    """Slow at a boundary or after `t_max` fast steps; the Selector then selects anew."""

    fills = True

    def __init__(self, config: SfiConfig, trigger: Trigger, layers: Sequence[int] = ()) -> None:
        """See `Policy`."""
        super().__init__(config, trigger, layers)
        self._settings = {**dataclasses.asdict(self.config.selector), "span": self.config.span}

    def select_after(self, context: Evidence) -> Selection:
        """Run the Selector and take the positions with the highest scores (Algorithm 2)."""
        diagnostics: dict[str, torch.Tensor] = {}
        alone = context.interval is not None and context.ranks.size == 1
        by = fastest(context.backend, context.allowed_BT.device) if alone else context.backend
        with context.span("selector"):
            evidence = context.logits(), context.key_norm_BHT, context.allowed_BT
            options = {**self._settings, "log_sum_BHGW": context.log_sum_BHGW, "interval": context.interval}
            if context.wants_diagnostics:
                options["diagnostics"] = diagnostics
            if context.ranks.size > 1:
                options["gather"] = context.ranks.gather
            score, diagnostics["lambda_star"] = selector.on(by)(*evidence, **options)
            if self.config.page_size > 1:
                score = pool_by_page(score, self.config.page_size)  # docs/evidence/granularity.md has other ways
        with context.span("top_k"):
            index = top_k.on(context.backend)(score, self.config.budget)
        return Selection(index, diagnostics, by=by)
