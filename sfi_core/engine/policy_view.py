"""The `LayerContext` of a layer: logits, keys, norms and the policy's notes, computed when asked for."""

from collections.abc import Callable
from functools import partial

import torch

from sfi_core.engine.layer import Layer
from sfi_core.observers.events import SelectionEvent
from sfi_core.observers.observer import wants
from sfi_core.policies.context import BatchContext, LayerContext
from sfi_kernels.step_descriptor import StepDescriptor


def layer_context(
    layer: Layer,
    rows: tuple[int, ...],
    query_RHGWD: torch.Tensor,
    logits: Callable[[], torch.Tensor] | None = None,
    log_sum_RHGW: torch.Tensor | None = None,
) -> LayerContext:
    """Make the context of a layer for some requests; the arguments are those of `refresh`."""
    run, index = layer.run, layer.index
    chosen, requests = run.rows(rows), run.requests_of(rows)
    return LayerContext(
        layer=index,
        backend=layer.backend,
        allowed_BT=chosen.allowed_RT,
        key_norm_BHT=run.store.norms(index, rows, chosen.longest),
        logits=logits or partial(layer.logits, rows, query_RHGWD),
        log_sum_BHGW=log_sum_RHGW,
        interval=_interval(layer, rows),
        span=partial(run.observer.span, layer=index),
        wants_diagnostics=wants(run.observer, SelectionEvent),
        ranks=run.ranks,
        states=tuple(run.requests[row] for row in rows),
        query_BHGWD=query_RHGWD,
        scale=layer.logit_options["scale"],
        keys=lambda place, start, stop: run.store.keys(index, rows[place], start, stop),
        values=lambda place, start, stop: run.store.values(index, rows[place], start, stop),
        notes=tuple(run.notes[request, index] for request in requests),
        codes=tuple(run.codes(index).of(slice(row, row + 1)) for row in rows)
        if run.chooses
        else (),
    )


def batch_context(
    layer: Layer, step: StepDescriptor, query_BHG1D: torch.Tensor, *, fast: bool
) -> BatchContext:
    """Make the context of a layer for all requests; `fast` as there."""
    run, segment = layer.run, layer.run.segment(layer.index)
    return BatchContext(
        fast=fast,
        query_BHGD=query_BHG1D[:, :, :, 0],
        key_PHND=layer.pages.key_PHND,
        value_PHNE=layer.pages.value_PHNE,
        block_table_BP=run.store.block_table_BP,
        descriptor=step,
        codes=run.codes(layer.index),
        position_BHS=segment.position_BHS,
        length_BH=segment.length_BH,
        scale=layer.logit_options["scale"],
    )


def _interval(layer: Layer, rows: tuple[int, ...]) -> tuple[int, int] | None:
    if len(rows) > 1 or layer.backend != "torch":
        return None
    state = layer.run.requests[rows[0]]
    return state.sink(layer.run.policy.config.sink), state.recent_start
