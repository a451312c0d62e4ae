"""Candidates between `sfi` and `codescan`, for the study alone; docs/evidence.md has what came of them."""

import torch

from sfi_core.policies import POLICIES, Selection, StepContext, StepPlan
from sfi_core.policies.codescan import CodeScan
from sfi_core.policies.context import LayerContext
from sfi_core.policies.freekv import pooled_cosine
from sfi_core.policies.shared import Triggered
from sfi_kernels.pseudo_token import PseudoToken

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

    def plan(self, context: StepContext) -> StepPlan:
        """See `Policy`."""
        return Triggered.plan(self, context)

    def select_after(self, context: LayerContext) -> None:
        """Learn the basis at the prompt's end only."""
        if "basis" not in context.notes[0]:
            super().select_after(context)


def register() -> None:
    """Let `methods.toml` name the candidates, in this process."""
    POLICIES.update(
        {
            "codescan-every-2": EverySecond,
            "codescan-every-4": EveryFourth,
            "codescan-where-moved": WhereMoved,
            "codescan-slow-at-boundaries": SlowAtBoundaries,
        }
    )
