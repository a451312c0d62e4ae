"""One layer of a decoding step inside a CUDA graph: the device's work, whatever the requests."""

from functools import partial

import torch

from sfi_core.engine.backends import triton as backend
from sfi_core.engine.graphs.buffers import StepBuffers
from sfi_core.engine.layer import Layer
from sfi_core.engine.packing import note_selection
from sfi_core.engine.refresh import choose, note_choice
from sfi_core.engine.run import Run
from sfi_core.observers.events import SelectionEvent
from sfi_core.observers.observer import wants
from sfi_core.policies.base import Evidence, EvidencePolicy, Selection
from sfi_kernels.decode_attention import DecodeAttention


def attend_replayed(buffers: StepBuffers, layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    """Attend as `backends.triton.attend` does in a decoding step, without host data that changes by step.

    Such data are in the buffers. `note_step` tells the observer once the step has been replayed.
    """
    run = layer.run
    step = buffers.dense if layer.left_dense else buffers.descriptor
    assert step is not None, "the pass has been described"
    last_BHG1D = query_BHGTD[:, :, :, -1:]  # a fast request has no other
    buffers.keep(layer.index, last_BHG1D[:, :, :, 0])
    with run.launches(layer.index):
        pseudo = None
        if layer.chooses:
            chosen, pseudo = choose(layer, step, last_BHG1D, fast=bool(step.fast))
            if chosen is not None:
                buffers.selections[layer.index] = chosen
        into = backend.evidence_room(layer, step, query_BHGTD)
        result = backend.decode(layer, step, query_BHGTD, into, pseudo=pseudo, in_place=layer.chooses)
    if result.logits_BHGWT is not None:
        run.maintenance.submit(partial(_select, buffers, layer, result))
    return result.out_BHGWE


def _select(buffers: StepBuffers, layer: Layer, result: DecodeAttention) -> None:
    run, rows, logits = layer.run, buffers.rows, result.logits_BHGWT
    assert isinstance(run.policy, EvidencePolicy), "other policies are not replayed"
    assert rows is not None, "the step refreshes"
    assert logits is not None, "evidence was asked for"
    with run.launches(layer.index):
        evidence = Evidence(
            layer=layer.index, backend=layer.backend, allowed_BT=rows.allowed_RT,
            key_norm_BHT=run.store.norms_of(layer.index, rows.head_pages(logits.shape[1])),
            logits=lambda: logits, log_sum_BHGW=result.log_sum_BHGW, length_B=rows.length_R,
            wants_diagnostics=wants(run.observer, SelectionEvent),
        )  # fmt: skip
        selection = run.policy.select_after(evidence)
        assert selection is not None, "a policy that needs only the evidence selects"
        run.store.pack_into(
            run.segment(layer.index), layer.index, rows.request_R, rows.sink_R, selection.index_BHK, rows.most_sink
        )
    buffers.selections[layer.index] = selection


def note_step(run: Run, selections: dict[int, Selection], places: dict[int, int]) -> None:
    """Update the host's counts and states after a replayed step, and tell the observer.

    The run's step has been described. `places` has the slow requests' rows in the selections, by their rows
    in the batch.
    """
    batch_pass, slow = run.batch_pass, run.batch_pass.descriptor.slow
    for layer in run.layers:
        left_dense = layer in run.policy.config.dense_layers
        step = batch_pass.dense_descriptor if left_dense else batch_pass.descriptor
        assert step is not None, "the pass has been described"
        backend.count_attention(run, step)
    if run.policy.chooses:
        for layer, selection in sorted(selections.items()):
            note_choice(run, layer, selection, batch_pass.descriptor.fast)
        return
    if not (selections and slow):
        return
    states = [run.requests[row] for row in slow]
    # True for a request without candidates
    empty = [state.recent_start == state.sink(run.policy.config.sink) for state in states]
    run.meter.count("triton.pack", len(selections) * len(slow))
    run.meter.count("triton.selector", len(selections) * empty.count(False))
    heard, layers = wants(run.observer, SelectionEvent), sorted(selections)
    for layer in layers if heard else layers[-1:]:  # every layer packs the same number of tokens
        selection = selections[layer]
        nothing = Selection(selection.index_BHK[:, :, :0]) if any(empty) else selection
        for row, bare in zip(slow, empty, strict=True):
            chosen = nothing if bare else selection
            note_selection(run, layer, row, places[row], chosen, heard=heard)
