"""Candidates for the study alone: between `sfi` and `codescan`, and other scores of a page.

docs/evidence.md and docs/evidence/granularity.md have what came of them.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from sfi_core.policies import POLICIES, Selection
from sfi_core.policies.base import Triggered
from sfi_core.policies.built_in.codescan import CodeScan
from sfi_core.policies.built_in.freekv import pooled_cosine
from sfi_core.policies.built_in.sfi import SFI
from sfi_core.policies.context import LayerContext
from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.pseudo_token import PseudoToken

Reduction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MOVED = 0.85  # pooled query cosine under which a KV head selects anew


class EverySecond(CodeScan):
    """Scan at every second step only; in between the last choice, without a pseudo token."""

    steps = 2

    def select_before(self, context: LayerContext) -> Selection | None:  # type: ignore[override]
        """See `Policy`."""
        return None if (context.states[0].step - 1) % self.steps else super().select_before(context)


class EveryFourth(EverySecond):
    """The same at every fourth step."""

    steps = 4


class WhereMoved(CodeScan):
    """Only KV heads whose query has moved since they last chose choose anew, and have a pseudo token."""

    def select_before(self, context: LayerContext) -> Selection:
        """See `Policy`."""
        selection = super().select_before(context)
        query_BHGD = context.query_BHGWD[:, :, :, -1]
        cosines = [
            pooled_cosine(query_HGD[None], note["chose"][None])[0]
            if "chose" in note
            else torch.full(query_HGD.shape[:1], -1.0)
            for note, query_HGD in zip(context.notes, query_BHGD, strict=True)
        ]
        moved_BH = torch.stack(cosines) < MOVED
        for note, query_HGD, moved_H in zip(context.notes, query_BHGD, moved_BH, strict=True):
            old_HGD = note.get("chose", query_HGD)
            note["chose"] = query_HGD.where(moved_H[:, None, None], old_HGD).clone()
        pseudo = selection.pseudo
        if pseudo is not None:
            logit_BHG = pseudo.logit_BHG.masked_fill(~moved_BH[..., None], -torch.inf)
            pseudo = PseudoToken(logit_BHG, pseudo.value_BHE)
        return Selection(selection.index_BHK, {}, moved_BH, pseudo)


class SlowAtBoundaries(CodeScan, Triggered):
    """CodeScan's steps, and a dense step wherever `sfi` has a slow one."""

    def select_after(self, context: LayerContext) -> None:
        """Learn the basis at the prompt's end only."""
        if "basis" not in context.notes[0]:
            super().select_after(context)


class PagesByBest(SFI):
    """A page counts as its best token, in place of the mean of its tokens' scores."""

    def pooled(self, score_BHT: torch.Tensor) -> torch.Tensor:
        """See `SFI.pooled`."""
        return self.by_page(score_BHT, lambda page_BHPN, _: page_BHPN.amax(-1))

    def by_page(self, score_BHT: torch.Tensor, reduce: Reduction) -> torch.Tensor:
        """Give every position of J what `reduce` makes of its page's log scores and of which are in J."""
        size, T = self.config.page_size, score_BHT.shape[-1]
        inside_BHT = score_BHT > MASKED_SCORE / 2
        score_BHT = score_BHT.masked_fill(~inside_BHT, MASKED_SCORE)
        page_BHPN = pad(score_BHT, (0, -T % size), value=MASKED_SCORE).unflatten(-1, (-1, size))
        found_BHP = reduce(page_BHPN, page_BHPN > MASKED_SCORE / 2)
        found_BHT = found_BHP.repeat_interleave(size, -1)[..., :T]
        return found_BHT.masked_fill(~inside_BHT, MASKED_SCORE)


class PagesByMeanLog(PagesByBest):
    """A page counts as the mean of its tokens' log scores."""

    def pooled(self, score_BHT: torch.Tensor) -> torch.Tensor:
        """See `SFI.pooled`."""
        return self.by_page(score_BHT, _mean)


def _mean(page_BHPN: torch.Tensor, inside_BHPN: torch.Tensor) -> torch.Tensor:
    return page_BHPN.masked_fill(~inside_BHPN, 0).sum(-1) / inside_BHPN.sum(-1).clamp_min(1)


def register() -> None:
    """Let `methods.toml` name the candidates, in this process."""
    POLICIES.update(
        {
            "codescan-every-2": EverySecond,
            "codescan-every-4": EveryFourth,
            "codescan-where-moved": WhereMoved,
            "codescan-slow-at-boundaries": SlowAtBoundaries,
            "sfi-pages-best": PagesByBest,
            "sfi-pages-mean-log": PagesByMeanLog,
        }
    )
