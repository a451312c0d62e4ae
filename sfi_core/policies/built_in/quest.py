"""Quest: pages by an upper bound of the current query's logits (Tang et al., 2024, arXiv:2406.10774).

Unlike in the authors' code, the query heads of a KV head share a selection, by their largest bound; layers 0
and 1 are dense only if they are in `dense_layers`; and the budget may cut the last page short. So all methods
read as many tokens.
"""

from sfi_core.policies.base import BatchContext
from sfi_core.policies.page_bounds import ByPage
from sfi_kernels.choice import Choice
from sfi_kernels.page_scan import page_scan


class Quest(ByPage):
    """Every step selects anew by the element-wise extremes of each page's keys."""

    fills = drafts = True

    @property
    def page(self) -> int:
        """See `ByPage`."""
        return self.config.baseline.page

    def choose(self, batch: BatchContext) -> Choice | None:
        """Take the tokens of the pages with the highest bounds; bring the extremes up to date in any case."""
        choice = page_scan.on(batch.backend)(
            batch.query_BHGD, batch.key_PHND, batch.block_table_BP, batch.descriptor, batch.kept.pages,
            batch.position_BHS, batch.length_BH, page=self.page, budget=batch.budget(self.config.budget),
        )  # fmt: skip
        return choice if batch.fast else None
