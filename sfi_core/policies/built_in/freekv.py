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

from sfi_core.policies.base import Companion, LayerContext, Policy, Selection, stacked
from sfi_core.policies.page_bounds import best_pages, bounds, extremes, extremes_bytes
from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger


class FreeKV(Companion, Policy):
    """Every step reads the last step's selection; heads whose query changed much select anew first."""

    fills = offloads = True
    fixed: ClassVar = {"recent_mode": "sliding", "window_prefill": 1}  # the prompt's last query selects first

    def __init__(self, config: SfiConfig, trigger: Trigger, layers: Sequence[int] = ()) -> None:
        """See `Policy`; the first of `layers` may become one of `dense_layers`."""
        if config.freekv.first_layer_dense and layers:
            dense = {*config.dense_layers, min(layers)}
            config = config.replace(dense_layers=tuple(sorted(dense)))
        super().__init__(config, trigger, layers)

    def select_after(self, context: LayerContext) -> Selection:
        """Select with the prompt's last query: step 0 is the only slow step."""
        self._score(context)
        return self._best(context, ahead=1)

    def select_before(self, context: LayerContext) -> Selection:
        """Select anew for the heads whose pooled query cosine is below tau (correction)."""
        query_BHGD = context.query_BHGWD[:, :, :, -1]
        last = [note.get("query", query) for note, query in zip(context.notes, query_BHGD, strict=True)]
        cosine_BH = pooled_cosine(query_BHGD, torch.stack(last))
        self._score(context)
        corrected = self._best(context)
        moved_BH = cosine_BH < self.config.freekv.tau
        return Selection(corrected.index_BHK, {"query_cosine": cosine_BH}, moved_BH)

    def select_next(self, context: LayerContext) -> Selection:
        """Select for the next step with this step's scores (speculative retrieval)."""
        return self._best(context, ahead=1)

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """See `Policy`."""
        return extremes_bytes(layer, capacity, self.config.freekv.page)

    def selection_tokens(self, state: RequestState) -> float:
        """Count a page's two extremes as one token."""
        return state.length / self.config.freekv.page

    def _score(self, context: LayerContext) -> None:
        # keeps the step's query and page scores in the notes
        page = self.config.freekv.page
        for place, note in enumerate(context.notes):
            query_HGD = context.query_BHGWD[place, :, :, -1]
            note["query"] = query_HGD.clone()
            bound_HGP = bounds(query_HGD, *extremes(context, place, page))
            note["score"] = group_scores(bound_HGP, context.scale)

    def _best(self, context: LayerContext, ahead: int = 0) -> Selection:
        # the best pages within the J of `ahead` steps from now
        page, budget = self.config.freekv.page, self.config.budget
        chosen = []
        for note, state in zip(context.notes, context.states, strict=True):
            sink = state.sink(self.config.sink)
            recent_start = max(sink, state.length + ahead - self.config.recent)
            chosen.append(best_pages(note["score"], page, (sink, recent_start), budget))
        return Selection(stacked(chosen))


def group_scores(bound_HGP: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the group-consistent page scores, the mean over G of softmax(P^h), [H, P] (Sec. 3.2).

    Paper gap: the softmax includes the pages of sink and recent tokens, which are not selected.
    """
    return (bound_HGP * scale).softmax(-1).mean(1)


def pooled_cosine(query_BHGD: torch.Tensor, last_BHGD: torch.Tensor) -> torch.Tensor:
    """Return C_i, the cosine of this step's query with the last one's, the mean over G, [B, H] (Sec. 3.3)."""
    return torch.cosine_similarity(query_BHGD.float(), last_BHGD.float(), -1).mean(-1)
