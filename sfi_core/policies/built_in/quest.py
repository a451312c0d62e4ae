"""Quest: pages by an upper bound of the current query's logits (Tang et al., 2024, arXiv:2406.10774).

Unlike in the authors' code, the query heads of a KV head share a selection, by their largest bound; layers 0
and 1 are dense only if they are in `dense_layers`; and the budget may cut the last page short. So all methods
read as many tokens.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from sfi_core.policies.base import BatchContext, Companion, LayerContext, Notes, Policy, Selection
from sfi_core.policies.page_bounds import KeptPages, extremes_bytes, learn_pages
from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.choice import Choice
from sfi_kernels.page_scan import PageSummaries, page_scan


class Quest(Companion, Policy):
    """Every step selects anew by the element-wise extremes of each page's keys."""

    fills = drafts = offloads = prompt_only = True
    fixed: ClassVar = {"recent_mode": "sliding", "window_prefill": 1}  # every step selects, the first by its own query

    def __init__(self, config: SfiConfig, trigger: Trigger, layers: Sequence[int] = ()) -> None:
        """See `Policy`."""
        super().__init__(config, trigger, layers)
        self.least_recent = self.config.baseline.page

    def select_after(self, context: LayerContext) -> Selection:
        """Summarize the prompt's pages; select nothing yet."""
        for place, note in enumerate(context.notes):
            learn_pages(context, place)
            note["summarized"] = True
        H = context.key_norm_BHT.shape[1]
        return Selection(torch.empty(len(context.notes), H, 0, dtype=torch.int32, device=context.key_norm_BHT.device))

    def lacks(self, state: RequestState, note: Notes) -> bool:
        """Say whether the prompt had no candidates, and so no selection."""
        return "summarized" not in note

    def keeps(
        self, rows: int, group: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, capacity: int
    ) -> KeptPages:
        """See `Companion`."""
        page = self.config.baseline.page
        return KeptPages(page, PageSummaries.empty(rows, key_PHND, capacity, page))

    def choose(self, batch: BatchContext) -> Choice | None:
        """Take the tokens of the pages with the highest bounds; bring the extremes up to date in any case."""
        choice = page_scan.on(batch.backend)(
            batch.query_BHGD, batch.key_PHND, batch.block_table_BP, batch.descriptor, batch.kept.pages,
            batch.position_BHS, batch.length_BH, page=batch.kept.page, budget=batch.budget(self.config.budget),
        )  # fmt: skip
        return choice if batch.fast else None

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """See `Policy`."""
        return extremes_bytes(layer, capacity, self.config.baseline.page)

    def selection_tokens(self, state: RequestState) -> float:
        """Two vectors a page, as large as a token's key and value."""
        return state.length / self.config.baseline.page
