"""Selections that are broken in one known way each: whether the rules of selection health see them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from sfi_core.policies.base import BatchContext, LayerContext, Policy, Selection, Triggered
from sfi_core.policies.built_in.codescan import CodeScan
from sfi_core.policies.built_in.sfi import SFI
from sfi_kernels.choice import Choice

PAGE = 16  # tokens
SINKS = 4
NONE = torch.iinfo(torch.int32).max  # sorts what is no position behind all positions


class Broken(Triggered):
    """`sfi` whose selections are changed once they are made; on the torch backend, a request at a time."""

    def __init__(self, *arguments: Any) -> None:
        """Take what `SFI` takes, and remember the last selection of every layer and request."""
        super().__init__(*arguments)
        self.whole = SFI(self.config, *arguments[1:])
        self.last: dict[tuple[int, int], torch.Tensor] = {}

    def select_after(self, context: LayerContext) -> Selection | None:
        """Select as `sfi`, then break it."""
        selection = self.whole.select_after(context)
        index = self.broken(selection.index_BHK, context)
        return None if index is None else Selection(index, selection.diagnostics)

    def broken(self, index_BHK: torch.Tensor, context: LayerContext) -> torch.Tensor | None:
        """Return other positions; None keeps those of the refresh before."""
        return index_BHK


class WrongHead(Broken):
    """Each KV head reads what the head before it selected; without effect on a model of one KV head."""

    def broken(self, index_BHK: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """See `Broken`."""
        return index_BHK.roll(1, 1)


class Stale(Broken):
    """Only a request's first refresh, at the end of its prompt, counts."""

    def broken(self, index_BHK: torch.Tensor, context: LayerContext) -> torch.Tensor | None:
        """See `Broken`."""
        where = context.layer, context.states[0].request
        old, self.last[where] = self.last.get(where), index_BHK
        return index_BHK if old is None else None


class OffByAPage(Broken):
    """All positions are those of the next page; at the end of J, of its first page."""

    def broken(self, index_BHK: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """See `Broken`."""
        allowed = context.allowed_BT[0].nonzero()[:, 0]
        first, count = int(allowed[0]), len(allowed)
        moved = (index_BHK - first + PAGE) % count + first
        return _ascending(torch.where(index_BHK >= 0, moved, -1))


class SinksDropped(Broken):
    """Neither the policy nor its selection reads the first tokens; runs with sink 0."""

    fixed: ClassVar = {"sink": 0}

    def broken(self, index_BHK: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """See `Broken`."""
        return _ascending(index_BHK.masked_fill(index_BHK < SINKS, -1))


class BudgetHalved(Broken):
    """Every second selected position is lost."""

    def broken(self, index_BHK: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """See `Broken`."""
        return index_BHK[..., ::2].contiguous()


class OtherRequest(Broken):
    """A request reads the positions that the layer selected last for the request before it, of the same length."""

    def broken(self, index_BHK: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """See `Broken`."""
        request = context.states[0].request
        self.last[context.layer, request] = index_BHK
        return self.last.get((context.layer, request - 1), index_BHK)


class OtherValues(Broken):
    """Each layer but the first reads the values that the layer before it has packed; see `packed`."""


class OtherCodes(CodeScan):
    """`codescan` that scores each request's keys with the codes of the request before it."""

    def choose(self, batch: BatchContext) -> Choice | None:
        """See `Policy.choose`."""
        codes = batch.kept
        theirs = codes._replace(word_BHWT=codes.word_BHWT.roll(1, 0))
        choice = super().choose(replace(batch, kept=theirs))
        codes.word_BHWT.copy_(theirs.word_BHWT.roll(-1, 0))
        return choice


BROKEN: dict[str, type[Policy]] = {
    "wrong-head": WrongHead,
    "stale": Stale,
    "off-by-one-page": OffByAPage,
    "sinks-dropped": SinksDropped,
    "budget-halved": BudgetHalved,
    "positions-of-another-request": OtherRequest,
    "values-of-another-layer": OtherValues,
    "codes-of-another-prompt": OtherCodes,
}


def packed(note: Callable[..., None]) -> Callable[..., None]:
    """Wrap `select.note`, which follows every packing, for `OtherValues`."""

    def wrapped(run: Any, layers: Sequence[int], places: Mapping[int, int], *rest: Any) -> None:
        note(run, layers, places, *rest)
        for layer in layers if isinstance(run.policy, OtherValues) else ():
            before = max((index for index in run.segments if index < layer), default=layer)
            for row in places:
                run.segments[layer].value_BHSE[row] = run.segments[before].value_BHSE[row]

    return wrapped


def _ascending(index_BHK: torch.Tensor) -> torch.Tensor:
    sorted_BHK = index_BHK.masked_fill(index_BHK < 0, NONE).sort(-1).values
    return sorted_BHK.masked_fill(sorted_BHK == NONE, -1).int()
