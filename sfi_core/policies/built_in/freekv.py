"""FreeKV: pages selected by the query of the last step, corrected by this step's (Liu et al., 2025).

Step i attends to the pages that the query of step i - 1 selected, so that selection and recall are off the
critical path (Sec. 3.2). A KV head whose query has changed much selects anew before it attends (Sec. 3.3).

Two differences from the paper. The budget may cut the last page short, so that all methods read as many
tokens. And every step scores the pages before it attends, the paper only steps with a correction: only the
device knows which heads to correct, and scoring later would read the summaries twice on such steps.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from sfi_core.policies.base import BatchContext, LayerContext, Notes, Selection, stacked
from sfi_core.policies.page_bounds import ByPage, KeptPages
from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.choice import Choice
from sfi_kernels.page_scan import page_scan
from sfi_kernels.page_scan.reference import best_pages, bounds, group_scores


class FreeKV(ByPage):
    """Every step reads the last step's selection; heads whose query changed much select anew first."""

    fills = ahead = True

    def __init__(self, config: SfiConfig, trigger: Trigger, layers: Sequence[int] = ()) -> None:
        """See `Policy`; the first of `layers` may become one of `dense_layers`."""
        if config.freekv.first_layer_dense and layers:
            dense = {*config.dense_layers, min(layers)}
            config = config.replace(dense_layers=tuple(sorted(dense)))
        super().__init__(config, trigger, layers)
        self.ahead = not self.predicts

    @property
    def predicts(self) -> bool:
        """See `Policy`."""
        return self.config.freekv.ahead == "half"

    @property
    def page(self) -> int:
        """See `ByPage`."""
        return self.config.freekv.page

    def select_after(self, context: LayerContext) -> Selection:
        """Select with the prompt's last query, for step 1: step 0 is the only slow step."""
        if self.predicts:
            return super().select_after(context)
        chosen = []
        for place, state in enumerate(context.states):
            last, query_HGD = context.kept[place].last, context.query_BHGWD[place, :, :, -1]
            score_HP = group_scores(bounds(query_HGD, *self.learn_pages(context, place)), context.scale)
            sink, now = state.sink(self.config.sink), state.length % 2
            allowed = sink, max(sink, state.length + 1 - self.config.recent)
            index_HK = best_pages(score_HP, self.page, allowed, self.config.budget)
            last.index_B2HK[0, now] = pad(index_HK, (0, self.config.budget - index_HK.shape[1]), value=-1)
            last.query_B2HGD[0, now] = query_HGD
            chosen.append(index_HK)
        return Selection(stacked(chosen))

    def lacks(self, state: RequestState, note: Notes) -> bool:
        """See `ByPage`; what is chosen for the next step is always there."""
        return self.predicts and super().lacks(state, note)

    def keeps(
        self, rows: int, group: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, capacity: int
    ) -> KeptPages:
        """See `Companion`."""
        kept, (_, H, _, D) = super().keeps(rows, group, key_PHND, value_PHNE, capacity), key_PHND.shape
        if self.predicts:
            return kept
        query = key_PHND.new_zeros(rows, 2, H, group, D)
        index = key_PHND.new_full((rows, 2, H, self.config.budget), -1, dtype=torch.int32)
        return replace(kept, parts=(*kept.parts, query, index))

    def choose(self, batch: BatchContext) -> Choice | None:
        """Read what the last step chose; correct heads whose pooled query cosine is below tau; choose ahead.

        By a predicted query, choose for this step.
        """
        last, budget = (
            (None, batch.budget(self.config.budget)) if self.predicts else (batch.kept.last, self.config.budget)
        )
        choice = page_scan.on(batch.backend)(
            batch.query_BHGD, batch.key_PHND, batch.block_table_BP, batch.descriptor, batch.kept.pages,
            batch.position_BHS, batch.length_BH, last, page=self.page, budget=budget, recent=self.config.recent,
            scale=batch.scale, tau=self.config.freekv.tau, diagnoses=batch.wants_diagnostics, grouped=True,
            early=batch.early,
        )  # fmt: skip
        return choice if batch.fast else None

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """Count the queries and positions of two steps, too."""
        if self.predicts:
            return super().summary_bytes(layer, capacity)
        query = layer.query_heads * layer.key_width * layer.itemsize
        index = layer.heads * self.config.budget * torch.int32.itemsize
        return super().summary_bytes(layer, capacity) + 2 * (query + index)
