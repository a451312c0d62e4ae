"""Quest: pages by an upper bound of the current query's logits (Tang et al., 2024, arXiv:2406.10774).

Unlike in the authors' code, the query heads of a KV head share a selection, by their largest bound; layers 0
and 1 are dense only if they are in `dense_layers`; and the budget may cut the last page short. So all methods
read as many tokens.
"""

from typing import ClassVar

from sfi_core.policies import page_bounds as pages
from sfi_core.policies.base import LayerContext, Notes, Policy, Selection, stacked
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState


class Quest(Policy):
    """Every step selects anew by the element-wise extremes of each page's keys."""

    fills = drafts = offloads = True
    fixed: ClassVar = {"recent_mode": "sliding"}  # since every step selects

    def select_before(self, context: LayerContext) -> Selection:
        """Take the tokens of the pages with the highest scores."""
        page, chosen = self.config.baseline.page, []
        for place, state in enumerate(context.states):
            score_HGP = pages.bounds(context.query_BHGWD[place, :, :, -1], *pages.extremes(context, place, page))
            allowed = state.sink(self.config.sink), state.recent_start
            chosen.append(pages.best_pages(score_HGP.amax(1), page, allowed, self.config.budget))
        return Selection(stacked(chosen))

    def rewind(self, note: Notes, length: int) -> None:
        """Forget the pages that hold positions from `length` on."""
        pages.forget(note, length, self.config.baseline.page)

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """See `Policy`."""
        return pages.extremes_bytes(layer, capacity, self.config.baseline.page)

    def selection_tokens(self, state: RequestState) -> float:
        """Two vectors a page, as large as a token's key and value."""
        return state.length / self.config.baseline.page
