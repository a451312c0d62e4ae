"""What a layer shows its policy: logits, keys, norms and the policy's own notes, made when asked for."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from sfi_core.engine.run import SHARED
from sfi_core.observers.observer import hears
from sfi_core.policies.base import LayerContext
from sfi_kernels.dense_attention import window_logits
from sfi_kernels.partial_attention import capped

if TYPE_CHECKING:
    from sfi_core.engine.layer import LayerStep

BLOCK = 128  # queries of the prompt whose logits are held at once


def layer_context(
    step: "LayerStep",
    rows: tuple[int, ...],
    query_RHGWD: torch.Tensor,
    logits: Callable[[], torch.Tensor] | None = None,
    log_sum_RHGW: torch.Tensor | None = None,
) -> LayerContext:
    """Gather what a policy may look at in one layer, for some requests.

    Args:
        step: The layer's step.
        rows: The requests.
        query_RHGWD: The queries that select.
        logits: Returns their logits, where the attention has made them already.
        log_sum_RHGW: The log-sum-exp of those over J.
    """
    run, layer = step.run, step.layer
    chosen = run.rows(rows)
    make_logits = partial(
        window_logits.on(step.backend),
        query_RHGWD,
        step.pages.key_PHND,
        chosen.table_RP,
        chosen.length_R,
        **step.logit_options,
        longest=chosen.longest,
    )
    return LayerContext(
        layer=layer,
        requests=rows,
        backend=step.backend,
        allowed_BT=chosen.allowed_RT,
        key_norm_BHT=run.cache.norms(layer, rows, chosen.longest),
        logits=logits or make_logits,
        log_sum_BHGW=log_sum_RHGW,
        span=partial(run.observer.span, layer=layer),
        heard=hears(run.observer, "on_selection"),
        states=tuple(run.requests[row] for row in rows),
        query_BHGWD=query_RHGWD,
        keys=lambda place, start, stop: run.cache.keys(layer, rows[place], start, stop),
        attended=lambda place: _attended(step, rows[place], query_RHGWD[place, :, :, -1]),
        notes=tuple(run.notes[request, layer] for request in run.requests_of(rows)),
        shared=tuple(run.notes[request, SHARED] for request in run.requests_of(rows)),
        interval=_interval(step, rows),
        ranks=run.ranks,
    )


def _interval(step: "LayerStep", rows: tuple[int, ...]) -> tuple[int, int] | None:
    if len(rows) > 1 or step.backend != "torch":
        return None
    state = step.run.requests[rows[0]]
    return state.sink(step.run.policy.config.sink), state.recent_start


def prompt_blocks(step: "LayerStep", query_BHGTD: torch.Tensor) -> Iterator[LayerContext]:
    """Show every query of a piece of the prompt once, request by request."""
    T = query_BHGTD.shape[3]
    for row, count in enumerate(step.forward.count):
        for start in range(0, count, BLOCK):
            stop = min(start + BLOCK, count)
            query = query_BHGTD[row : row + 1, :, :, T - count + start : T - count + stop]
            length = step.forward.start[row] + stop
            logits = partial(
                window_logits.on(step.backend),
                query,
                step.pages.key_PHND,
                step.run.cache.block_table_BP[row : row + 1],
                torch.tensor([length], dtype=torch.int32, device=query.device),
                **step.logit_options,
                longest=length,
            )
            yield replace(layer_context(step, (row,), query), logits=logits)


def _attended(
    step: "LayerStep", row: int, query_HGD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    segment, state = step.run.segments[step.layer], step.run.requests[row]
    packed, recent = state.packed_tokens, (state.recent_start, state.length)
    recent_HND = step.run.cache.keys(step.layer, row, *recent)[0]
    key_HSD = torch.cat([segment.key_BHSD[row, :, :packed], recent_HND], 1)
    recent_HN = torch.arange(*recent, device=key_HSD.device).expand(len(key_HSD), -1)
    position_HS = torch.cat([segment.position_BHS[row, :, :packed].long(), recent_HN], 1)
    scaled_HGD = query_HGD.float() * step.logit_options["scale"]
    logits_HGS = capped(scaled_HGD @ key_HSD.float().mT, step.logit_options["soft_cap"])
    return logits_HGS, position_HS
