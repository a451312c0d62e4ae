"""FreeKV: pages selected by the query of the last step, corrected by this step's (Liu et al., 2025).

Step i attends to the pages that the query of step i - 1 selected, so that selection and recall are off the
critical path (Sec. 3.2). A KV head whose query has changed much selects anew before it attends (Sec. 3.3).

Two differences from the paper. The budget may cut the last page short, so that all methods read as many
tokens. And every step scores the pages before it attends, the paper only steps with a correction: only the
device knows which heads to correct, and scoring later would read the summaries twice on such steps.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.nn.functional import pad

from sfi_core.policies.base import BatchContext, Companion, LayerContext, Policy, Selection, stacked
from sfi_core.policies.page_bounds import KeptPages, extremes_bytes, learn_pages
from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.choice import Choice
from sfi_kernels.page_scan import LastStep, PageSummaries, page_scan_ahead
from sfi_kernels.page_scan.reference import best_pages, bounds, group_scores


class FreeKV(Companion, Policy):
    """Every step reads the last step's selection; heads whose query changed much select anew first."""

    fills = offloads = prompt_only = ahead = True
    fixed: ClassVar = {"recent_mode": "sliding", "window_prefill": 1}  # the prompt's last query selects first

    def __init__(self, config: SfiConfig, trigger: Trigger, layers: Sequence[int] = ()) -> None:
        """See `Policy`; the first of `layers` may become one of `dense_layers`."""
        if config.freekv.first_layer_dense and layers:
            dense = {*config.dense_layers, min(layers)}
            config = config.replace(dense_layers=tuple(sorted(dense)))
        super().__init__(config, trigger, layers)
        self.least_recent = self.config.freekv.page

    def select_after(self, context: LayerContext) -> Selection:
        """Select with the prompt's last query, for step 1: step 0 is the only slow step."""
        chosen = []
        for place, state in enumerate(context.states):
            kept, query_HGD = context.kept[place], context.query_BHGWD[place, :, :, -1]
            score_HP = group_scores(bounds(query_HGD, *learn_pages(context, place)), context.scale)
            sink, now = state.sink(self.config.sink), state.length % 2
            allowed = sink, max(sink, state.length + 1 - self.config.recent)
            chosen.append(best_pages(score_HP, kept.page, allowed, self.config.budget))
            room = kept.last.index_B2HK.shape[3]
            kept.last.index_B2HK[0, now] = pad(chosen[-1], (0, room - chosen[-1].shape[1]), value=-1)
            kept.last.query_B2HGD[0, now] = query_HGD
        return Selection(stacked(chosen))

    def keeps(
        self, rows: int, group: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, capacity: int
    ) -> KeptPages:
        """See `Companion`."""
        (_, H, _, D), page = key_PHND.shape, self.config.freekv.page
        query = key_PHND.new_zeros(rows, 2, H, group, D)
        index = key_PHND.new_full((rows, 2, H, self.config.budget), -1, dtype=torch.int32)
        return KeptPages(page, PageSummaries.empty(rows, key_PHND, capacity, page), LastStep(query, index))

    def choose(self, batch: BatchContext) -> Choice | None:
        """Read what the last step chose; correct heads whose pooled query cosine is below tau; choose ahead."""
        choice = page_scan_ahead.on(batch.backend)(
            batch.query_BHGD, batch.key_PHND, batch.block_table_BP, batch.descriptor, batch.kept.pages,
            batch.kept.last, batch.position_BHS, batch.length_BH, page=batch.kept.page, budget=self.config.budget,
            recent=self.config.recent, scale=batch.scale, tau=self.config.freekv.tau, diagnoses=batch.wants_diagnostics,
        )  # fmt: skip
        return choice if batch.fast else None

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """Count the extremes, and the queries and positions of two steps."""
        query = layer.query_heads * layer.key_width * layer.itemsize
        index = layer.heads * self.config.budget * torch.int32.itemsize
        return extremes_bytes(layer, capacity, self.config.freekv.page) + 2 * (query + index)

    def selection_tokens(self, state: RequestState) -> float:
        """Count a page's two extremes as one token."""
        return state.length / self.config.freekv.page
