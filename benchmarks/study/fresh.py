"""Controls: candidates for an `sfi` whose selection is fresh; codes (as `codescan`'s) say what has moved.

A step estimates all logits by the codes, and so the probability that the selection holds, beside that of the best
choice of equal size. A selection whose share of the best is below `least` has moved.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar
from unittest.mock import patch

import torch

from sfi_core.engine import select
from sfi_core.engine.batch_pass import Rows
from sfi_core.engine.layer import Layer
from sfi_core.policies.base import BatchContext, Companion, Evidence, LayerContext, Notes, Policy, Selection
from sfi_core.policies.built_in.codescan import QUERIES, CodeScan, choosing_tokens
from sfi_core.policies.built_in.sfi import SFI
from sfi_core.state.request import RequestState
from sfi_kernels import step_descriptor as step
from sfi_kernels.choice import Choice, write_row
from sfi_kernels.code_scan import code_tokens
from sfi_kernels.code_scan.reference import _mean_value, choose_likeliest, scanned
from sfi_kernels.partial_attention import PseudoToken


class Fresh(Companion, SFI):
    """`sfi` with the codes of all keys.

    Attributes:
        least: The least share of the best choice's probability that a selection holds.
        new: What is done where it holds less: "heads" are chosen anew by the codes at once, "slow" is a slow step next.
        held: Share of the budget that stays the Selector's where a head is chosen anew.
        estimates_rest: A pseudo token stands for the unread keys, as in `codescan`.
    """

    fixed: ClassVar = {"window_prefill": QUERIES}
    least: ClassVar[float] = 0.0
    new: ClassVar[str] = "heads"
    held: ClassVar[float] = 0.0
    estimates_rest: ClassVar[bool] = True
    keeps, _learn, _room = CodeScan.keeps, CodeScan._learn, CodeScan._room  # noqa: SLF001 - a control

    def select_after(self, context: Evidence) -> Selection:
        """Let the Selector select; at the end of a prompt learn the codes too."""
        if isinstance(context, LayerContext):
            for place, note in enumerate(context.notes):
                if "learned" not in note:
                    self._learn(context, place, note)
        return super().select_after(context)

    def lacks(self, state: RequestState, note: Notes) -> bool:
        """Say no: the study's answers are shorter than a basis lasts."""
        return False

    def selection_tokens(self, state: RequestState) -> float:
        """Count the scan."""
        if not self.key_width or self._room(state) <= self.config.budget:
            return 0.0
        return choosing_tokens(state.length, self.key_width) + self.estimates_rest

    def plan(self, requests: Sequence[RequestState]) -> list[str]:
        """Ask the trigger, and the shares of the last step."""
        reasons, shares, self.shares = super().plan(requests), getattr(self, "shares", {}), {}
        if self.new != "slow":
            return reasons
        drifted = [
            "drift" if (x := shares.get(row)) and sum(x) / len(x) < self.least else "" for row in range(len(requests))
        ]
        return [reason or drift for reason, drift in zip(reasons, drifted, strict=True)]

    def choose(self, batch: BatchContext) -> Choice | None:
        """Read the selection, chosen anew by the codes in heads where it has moved."""
        rows, codes = (batch.block_table_BP, batch.descriptor), batch.kept
        code_tokens.reference(batch.key_PHND, *rows, codes)
        if not batch.fast:
            return None
        B, H, G, _ = batch.query_BHGD.shape
        self.key_width, budget = batch.query_BHGD.shape[3], batch.budget(self.config.budget)
        index_BHK = batch.position_BHS.new_full((B, H, budget), -1)
        logit_BHG = batch.query_BHGD.new_full((B, H, G), -torch.inf)
        value_BHE = torch.zeros_like(codes.sum_BHE)
        for row in batch.descriptor.fast:
            numbers = batch.descriptor.table_BX[row].tolist()
            first, stop = numbers[step.ALLOWED_START], numbers[step.ALLOWED_STOP]
            chosen_HK = torch.arange(max(stop - first, 0), dtype=torch.int32).expand(H, -1)
            if stop - first > budget:
                old_HK = batch.position_BHS[row, :, first : first + budget] - first
                est_HGT = scanned(batch.query_BHGD[row], codes, row, batch.scale)[..., first:stop]
                chosen_HK, logit_BHG[row] = self._chosen(row, est_HGT, old_HK, budget)
                value_BHE[row] = _mean_value(batch.value_PHNE, batch.block_table_BP[row], codes, row, first, stop)
            index_BHK[row, :, : chosen_HK.shape[1]] = chosen_HK + first
            write_row(batch.position_BHS, batch.length_BH, row, first, index_BHK[row, :, : chosen_HK.shape[1]])
        return Choice(index_BHK, PseudoToken(logit_BHG, value_BHE) if self.estimates_rest else None)

    def _chosen(
        self, row: int, est_HGT: torch.Tensor, old_HK: torch.Tensor, budget: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight_HGT, log_sum_HG = est_HGT.softmax(-1), est_HGT.logsumexp(-1)
        score_HT = weight_HGT.mean(1)
        known_HK = old_HK.long().clamp_min(0)
        best_HK, _ = choose_likeliest(est_HGT, budget, rest=1.0)
        has_H, best_H = (score_HT.gather(1, index.long()).sum(1) for index in (known_HK, best_HK))
        self.shares.setdefault(row, []).append(float((has_H / best_H).mean()))
        chosen_HK = old_HK
        if self.new == "heads":
            if self.held:  # the oldest choice's best part stays, whatever the codes say
                stays_HK = known_HK.gather(1, score_HT.gather(1, known_HK).topk(int(self.held * budget)).indices)
                best_HK = score_HT.scatter(1, stays_HK, 2.0).topk(budget).indices.sort().values.int()
            chosen_HK = torch.where((has_H < self.least * best_H)[:, None], best_HK, old_HK)
        read_HG = weight_HGT.gather(2, chosen_HK.long().clamp_min(0)[:, None].expand(-1, est_HGT.shape[1], -1)).sum(-1)
        return chosen_HK, log_sum_HG + ((1 - read_HG).clamp_min(0) * self.config.codescan.rest).log()


@contextmanager
def selections_noted() -> Iterator[None]:
    """Keep selections for the steps that choose after them: the engine's own policies have no use for them."""
    pack = select.pack

    def noting(layers: Sequence[Layer], rows: Rows, selection: Selection) -> object:
        for layer, index_RHK in zip(layers, selection.index_BHK.chunk(len(layers)), strict=True):
            if layer.in_place and isinstance(layer.run.policy, Fresh):
                segment = layer.run.segment(layer.index)
                for row, index_HK in zip(rows.requests, index_RHK, strict=False):
                    sink = layer.run.requests[row].sink(layer.run.policy.config.sink)
                    segment.reserve(sink + index_HK.shape[1])
                    write_row(segment.position_BHS, segment.length_BH, row, sink, index_HK)
        return pack(layers, rows, selection)

    with patch.object(select, "pack", noting):
        yield


class SelectorByCodes(Fresh):
    """The Selector at every step, of logits that the codes estimate: dense steps only where the trigger says so."""

    def choose(self, batch: BatchContext) -> Choice | None:
        """See `Fresh`."""
        code_tokens.reference(batch.key_PHND, batch.block_table_BP, batch.descriptor, batch.kept)
        if not batch.fast:
            return None
        self.key_width = batch.query_BHGD.shape[3]
        longest = max(int(length) for length in batch.descriptor.length_B)
        rows = [scanned(query_HGD, batch.kept, row, batch.scale)[..., :longest]
                for row, query_HGD in enumerate(batch.query_BHGD)]  # fmt: skip
        logits_BHGWT = torch.stack(rows)[:, :, :, None]
        return batch.read(SFI.select_after(self, replace(batch.evidence(), logits=lambda: logits_BHGWT)))

    estimates_rest = False


def _variant(name: str, **changes: object) -> type[Policy]:
    return type(name, (Fresh,), changes)


FRESH: dict[str, type[Policy]] = {
    "fresh-by-pseudo": _variant("Pseudo"),
    **{f"fresh-heads-{least}": _variant("Heads", least=least) for least in (0.5, 0.7, 0.9)},
    **{f"fresh-slow-{least}": _variant("Slow", least=least, new="slow") for least in (0.1, 0.2)},
    "fresh-half": _variant("Half", least=2.0, held=0.5),
    "fresh-selector": SelectorByCodes,
}
