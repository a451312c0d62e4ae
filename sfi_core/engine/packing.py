"""Packs a selection into the packed segments, updates the request's state and tells the observer."""

from collections.abc import Sequence
from functools import cache

import torch

from sfi_core.engine.layer import Layer
from sfi_core.engine.run import Run
from sfi_core.engine.step_events import tell_recall
from sfi_core.observers.events import SelectionEvent
from sfi_core.observers.observer import wants
from sfi_core.policies.base import Selection
from sfi_kernels.pack import pack_layers


def apply(layer: Layer, rows: tuple[int, ...], selection: Selection | None, reason: str = "") -> None:
    """Pack a layer's selection for some requests and tell the observer; None keeps the memory as it is.

    Where attention reads the rows in place, only their positions are noted.

    `reason` is that of `SelectionEvent`; "speculative" means a selection for the next step.
    """
    if selection is None:
        return
    run, index = layer.run, layer.index
    with run.observer.span("pack", index):
        if layer.in_place:
            _note_positions(layer, rows, selection)
        else:
            _pack(layer, rows, selection)
    heard = wants(run.observer, SelectionEvent)
    for place, row in enumerate(rows):
        note_selection(run, index, row, place, selection, reason, heard=heard)


def _note_positions(layer: Layer, rows: tuple[int, ...], selection: Selection) -> None:
    # as `pack` writes them; a tensor at a time, because a step does this in every layer
    run, K = layer.run, selection.index_BHK.shape[2]
    segment = run.segment(layer.index)
    for place, row in enumerate(rows):
        heads: slice | torch.Tensor = slice(None)
        if selection.heads_BH is not None:
            heads = selection.heads_BH[place]
        index_HK = selection.index_BHK[place, heads]
        sink = run.requests[row].sink(run.policy.config.sink)
        segment.reserve(sink + K)
        position_HS = segment.position_BHS[row]
        if position_HS.shape[1] > sink + K:
            position_HS[heads, sink + K :] = -1
        sinks_S = _sinks(sink, index_HK.device)
        position_HS[heads, : sink + K] = torch.cat([sinks_S.expand(len(index_HK), -1), index_HK], 1)
        segment.length_BH[row, heads] = (index_HK >= 0).sum(1, dtype=torch.int32).add_(sink)


@cache
def _sinks(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _pack(layer: Layer, rows: tuple[int, ...], selection: Selection) -> None:
    run, index, chosen = layer.run, layer.index, layer.run.rows(rows)
    brought = run.store.pack_into(
        run.segment(index), index, chosen.request_R, chosen.sink_R, selection.index_BHK, chosen.most_sink,
        selection.heads_BH,
    )  # fmt: skip
    if brought is not None:
        tell_recall(run, index, rows, brought)
    run.meter.count(f"{layer.backend}.pack", len(rows))


def apply_layers(layers: Sequence[Layer], row: int, selection: Selection) -> None:
    """Pack the selections of several layers for one request and tell the observer.

    The pages of the layers must hold every token; the batch dimension of `selection` is the layers.
    """
    run, chosen = layers[0].run, layers[0].run.rows((row,))
    pages = [(each.pages.key_PHND, each.pages.value_PHNE, *run.segment(each.index).tensors) for each in layers]
    pack_layers(pages, run.store.block_table_BP, row, selection.index_BHK, chosen.sink_R)
    run.meter.count(f"{layers[0].backend}.pack", len(layers))
    heard = wants(run.observer, SelectionEvent)
    for place, layer in enumerate(layers):
        note_selection(run, layer.index, row, place, selection, heard=heard)


def note_selection(
    run: Run, layer: int, row: int, place: int, selection: Selection, reason: str = "", *, heard: bool
) -> None:
    """Note what a layer packed for a request, row `place` of the selection; tell the observer if `heard`."""
    state = run.requests[row]
    ahead = reason == "speculative"
    state.note_packed(run.policy.config.sink, selection.index_BHK.shape[2], ahead=ahead)
    if not heard:  # making an event takes ten times as long as the note
        return
    event = SelectionEvent(
        request=state.request, step=state.step, layer=layer, index_HK=selection.index_BHK[place],
        diagnostics={name: value[place : place + 1] for name, value in selection.diagnostics.items()},
        reason=reason, heads_H=None if selection.heads_BH is None else selection.heads_BH[place],
    )  # fmt: skip
    run.observer.on(event)
