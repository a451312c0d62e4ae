"""What a layer shows its policy: logits, keys, norms and the policy's own notes, made when asked for."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from sfi_core.engine.layer import Layer
from sfi_core.observers.events import SelectionEvent
from sfi_core.observers.observer import wants
from sfi_core.policies.context import SHARED, LayerContext
from sfi_kernels.dense_attention import window_logits
from sfi_kernels.partial_attention import capped

BLOCK = 128  # queries of the prompt whose logits are held at once


def layer_context(
    layer: Layer,
    rows: tuple[int, ...],
    query_RHGWD: torch.Tensor,
    logits: Callable[[], torch.Tensor] | None = None,
    log_sum_RHGW: torch.Tensor | None = None,
) -> LayerContext:
    """Gather what a policy may look at in one layer, for some requests.

    Args:
        layer: The layer.
        rows: The requests.
        query_RHGWD: The queries that select.
        logits: Returns their logits, where the attention has made them already.
        log_sum_RHGW: The log-sum-exp of those over J.
    """
    run, index = layer.run, layer.index
    chosen, requests = run.rows(rows), run.requests_of(rows)
    make_logits = partial(layer.logits, rows, query_RHGWD)
    return LayerContext(
        layer=index,
        backend=layer.backend,
        allowed_BT=chosen.allowed_RT,
        key_norm_BHT=run.store.norms(index, rows, chosen.longest),
        logits=logits or make_logits,
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
        attended=lambda place: _attended(layer, rows[place], query_RHGWD[place, :, :, -1]),
        notes=tuple(run.notes[request, index] for request in requests),
        shared=tuple(run.notes[request, SHARED] for request in requests),
    )


def _interval(layer: Layer, rows: tuple[int, ...]) -> tuple[int, int] | None:
    if len(rows) > 1 or layer.backend != "torch":
        return None
    state = layer.run.requests[rows[0]]
    return state.sink(layer.run.policy.config.sink), state.recent_start


def prompt_blocks(layer: Layer, query_BHGTD: torch.Tensor) -> Iterator[LayerContext]:
    """Show every query of a piece of the prompt once, request by request."""
    T = query_BHGTD.shape[3]
    for row in layer.forward.prompts:
        count = layer.forward.count[row]
        for start in range(0, count, BLOCK):
            stop = min(start + BLOCK, count)
            query = query_BHGTD[row : row + 1, :, :, T - count + start : T - count + stop]
            length = layer.forward.start[row] + stop
            logits = partial(
                window_logits.on(layer.backend),
                query,
                layer.pages.key_PHND,
                layer.run.store.block_table_BP[row : row + 1],
                torch.tensor([length], dtype=torch.int32, device=query.device),
                **layer.logit_options,
                longest=length,
            )
            yield replace(layer_context(layer, (row,), query), logits=logits)


def _attended(layer: Layer, row: int, query_HGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    run, scale = layer.run, layer.logit_options["scale"]
    segment, state = run.segments[layer.index], run.requests[row]
    packed, recent = state.packed_tokens, (state.recent_start, state.length)
    recent_HND = run.store.keys(layer.index, row, *recent)[0]
    key_HSD = torch.cat([segment.key_BHSD[row, :, :packed], recent_HND], 1)
    recent_HN = torch.arange(*recent, device=key_HSD.device).expand(len(key_HSD), -1)
    position_HS = torch.cat([segment.position_BHS[row, :, :packed].long(), recent_HN], 1)
    logits_HGS = capped(
        query_HGD.float() * scale @ key_HSD.float().mT, layer.logit_options["soft_cap"]
    )
    return logits_HGS, position_HS
