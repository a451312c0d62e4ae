"""What Quest and FreeKV share: the element-wise extremes of each page's keys, which bound the logits of a query."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch.nn.functional import pad

from sfi_core.policies.base import Companion, Kept, LayerContext, Notes, Policy, Selection
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState
from sfi_kernels.page_scan import LastStep, PageSummaries, summarize


@dataclass(frozen=True, slots=True)
class KeptPages(Kept):
    """The extremes of a layer's pages of `page` tokens, and FreeKV's last step; a step renews what was taken back."""

    page: int

    @property
    def pages(self) -> PageSummaries:
        """The extremes."""
        return PageSummaries(*self.parts[:2])

    @property
    def last(self) -> LastStep:
        """The last step."""
        return LastStep(*self.parts[2:])

    def grown(self, capacity: int) -> Self:
        """See `Kept`."""
        more = -(-capacity // self.page) - self.parts[0].shape[2]
        if more <= 0:
            return self
        return replace(self, parts=(*(pad(part, (0, 0, 0, more)) for part in self.pages), *self.parts[2:]))


class ByPage(Companion, Policy):
    """Base of the policies that choose pages by bounds at every step."""

    fixed: ClassVar = {"recent_mode": "sliding", "window_prefill": 1}  # every step selects
    offloads = prompt_only = True

    @property
    def page(self) -> int:
        """Tokens of a page."""
        raise NotImplementedError

    @property
    def least_recent(self) -> int:
        """A page, which is summarized anew with every token."""
        return self.page

    def keeps(
        self, rows: int, group: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, capacity: int
    ) -> KeptPages:
        """See `Companion`."""
        _, H, _, D = key_PHND.shape
        low, high = (key_PHND.new_zeros(rows, H, -(-capacity // self.page), D) for _ in range(2))
        return KeptPages((low, high), self.page)

    def select_after(self, context: LayerContext) -> Selection:
        """Summarize the prompt's pages; select nothing yet."""
        for place, note in enumerate(context.notes):
            self.learn_pages(context, place)
            note["summarized"] = True
        norm_BHT = context.key_norm_BHT
        return Selection(torch.empty(*norm_BHT.shape[:2], 0, dtype=torch.int32, device=norm_BHT.device))

    def lacks(self, state: RequestState, note: Notes) -> bool:
        """Say whether the prompt had no candidates, and so no selection."""
        return "summarized" not in note

    def learn_pages(self, context: LayerContext, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the extremes of all pages of a request; return them, [H, P, D]."""
        ends = summarize(context.keys(place, 0, context.states[place].length)[0], self.page)
        for part_BHPD, end_HPD in zip(context.kept[place].pages, ends, strict=True):
            part_BHPD[0, :, : end_HPD.shape[1]] = end_HPD
        return ends

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """Count two extremes and a score a page."""
        return extremes_bytes(layer, capacity, self.page)

    def selection_tokens(self, state: RequestState) -> float:
        """Count a page's two extremes, each as large as a token's key or value, as one token."""
        return state.length / self.page


def extremes_bytes(layer: LayerShape, capacity: int, page: int) -> int:
    """Return the bytes of the extremes of the pages of `capacity` tokens, and of their scores."""
    numbers = 2 * layer.key_width * layer.itemsize + torch.float32.itemsize
    return -(-capacity // page) * layer.heads * numbers
