"""Attention of a layer in PyTorch: the reference backend.

Requests run one by one; neighbors that decode fast share calls, without a change to their results.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch

from sfi_core.engine.layer import Layer
from sfi_core.engine.packing import apply
from sfi_core.engine.refresh import (
    choose_and_note,
    end_prompt,
    joins,
    layer_context,
    refresh,
    refresh_later,
    select_next,
)
from sfi_kernels.attention_in_place import attention_in_place
from sfi_kernels.numpy_views import fastest
from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.sparse_attention import sparse_attention
from sfi_kernels.step_descriptor import FAST, PROMPT, sent

R = TypeVar("R")


def attend(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    """Attend with the pass's queries, and refresh the selected memory of slow requests.

    A request's own queries are the last `count` of T. Return the outputs, [B, H, G, T, E]; zeros where a
    request has no token.
    """
    alike, pseudo = list(_alike(layer)), None
    if layer.chooses and layer.batch_pass.decodes:
        pseudo = choose_and_note(layer, layer.batch_pass.descriptor, query_BHGTD[:, :, :, -1:])
    if len(alike) == 1 and layer.batch_pass.count == (query_BHGTD.shape[3],) * len(query_BHGTD):
        out = _attend(layer, alike[0], query_BHGTD, pseudo)
    else:
        out = _one_by_one(layer, alike, query_BHGTD, pseudo)
    end_prompt(layer, query_BHGTD)
    layer.finish(query_BHGTD, out)
    return out


def _one_by_one(
    layer: Layer, alike: list[slice], query_BHGTD: torch.Tensor, pseudo: PseudoToken | None
) -> torch.Tensor:
    B, H, G, T, _ = query_BHGTD.shape
    out = query_BHGTD.new_zeros(B, H, G, T, layer.pages.value_PHNE.shape[3])
    for rows in alike:
        new = slice(T - layer.batch_pass.count[rows.start], T)
        out[rows, :, :, new] = _attend(layer, rows, query_BHGTD[rows, :, :, new], pseudo and pseudo.of(rows))
    return out


def _attend(layer: Layer, rows: slice, query: torch.Tensor, pseudo: PseudoToken | None) -> torch.Tensor:
    kind = layer.batch_pass.passes[rows.start].kind
    if kind == PROMPT:
        return _dense(layer, rows, query)
    if layer.run.policy.mixes_heads and not layer.left_dense:
        return _mixed(layer, rows, query)
    if kind == FAST and not layer.left_dense:
        return _sparse(layer, rows, query, pseudo=pseudo) if layer.chooses else _fast(layer, rows, query)
    return _dense_and_refresh(layer, rows, query)


def _alike(layer: Layer) -> Iterator[slice]:
    # yields single rows, and ranges of neighbors that only attend sparsely
    policy = layer.run.policy
    own = (policy.selects_before or policy.selects_next) and not layer.chooses
    shares = not (layer.left_dense or own or policy.mixes_heads)
    kinds = [
        "" if not one.count else "fast" if shares and one.kind == FAST else "alone" for one in layer.batch_pass.passes
    ]
    first = 0
    for kind, group in groupby(kinds):
        stop = first + len(list(group))
        if kind == "fast":
            yield slice(first, stop)
        elif kind:
            yield from (slice(row, row + 1) for row in range(first, stop))
        first = stop


def _dense_and_refresh(layer: Layer, rows: slice, query: torch.Tensor) -> torch.Tensor:
    # for slow requests, and for all requests in `dense_layers`, which select nothing
    if layer.left_dense or not layer.run.policy.refreshes():
        return _whole(layer, rows, query, layer.verify)
    # the attention also returns the evidence's logits, which saves a pass over the keys
    out, own = _whole(layer, rows, query, layer.dense_with_logits)
    if joins(layer, rows.start):
        refresh_later(layer, rows.start, own)
    else:
        refresh(layer, (rows.start,), query[:, :, :, -1:], lambda: own)
    return out


def _dense(layer: Layer, rows: slice, query: torch.Tensor) -> torch.Tensor:
    out = _whole(layer, rows, query, layer.dense)
    layer.check_prompt(rows.start, query, out)
    return out


def _whole(layer: Layer, rows: slice, query: torch.Tensor, attention: Callable[[int, torch.Tensor], R]) -> R:
    run, row = layer.run, rows.start
    kind = "prefill" if layer.batch_pass.passes[row].kind == PROMPT else "dense"
    run.meter.count(f"{layer.backend}.{kind}_attention")
    moved = layer.moved_bytes((row,), dense=True)
    with run.observer.span("attention.dense", layer.index, moved):
        return attention(row, query)


def _mixed(layer: Layer, rows: slice, query: torch.Tensor) -> torch.Tensor:
    # some KV heads read everything, the others the packed memory and the recent tokens; a slow step then selects anew
    run, row = layer.run, rows.start
    state, logits = run.requests[row], None
    heads = run.policy.dense_heads(state, layer.index, query.shape[1])
    layer.dense_heads[row] = heads
    out = _sparse(layer, rows, query, "mixed_attention")
    if heads:
        with run.observer.span("attention.heads", layer.index):
            own, logits = layer.heads(row, query, heads, evidence=state.slow)
        for place, head in enumerate(heads):
            out[:, head] = own[:, place]
    if logits is not None:
        made = logits
        layer.later.append(partial(refresh, layer, (row,), query, lambda: made))
    return out


def _fast(layer: Layer, rows: slice, query: torch.Tensor) -> torch.Tensor:
    run, policy, row = layer.run, layer.run.policy, (rows.start,)
    chosen = None
    if policy.selects_before:
        with run.observer.span("select_before", layer.index):
            chosen = policy.select_before(layer_context(layer, row, query))
            apply(layer, row, chosen, "correction" if policy.selects_next else "")
    out = _sparse(layer, rows, query, pseudo=chosen.pseudo if chosen else None)
    if policy.selects_next:
        layer.later.append(partial(select_next, layer, row, query))
    return out


def _sparse(
    layer: Layer, rows: slice, query: torch.Tensor, path: str = "sparse_attention", pseudo: PseudoToken | None = None
) -> torch.Tensor:
    run, which = layer.run, range(rows.start, rows.stop)
    segment, step = run.segments[layer.index], layer.batch_pass.descriptor
    start_B = step.recent_start_B[rows]
    if run.policy.mixes_heads:
        # a slow step still reads the last selection, and all tokens since then
        starts = torch.tensor([run.requests[row].read_start for row in which], dtype=torch.int32)
        start_B = sent(starts, query.device)
    pages = layer.pages.key_PHND, layer.pages.value_PHNE
    by = fastest(layer.backend, query.device, *pages) if layer.in_place else layer.backend
    run.meter.count(f"{by}.{path}", len(which))
    run.store.ready(layer.index)
    moved = layer.moved_bytes(which, dense=False)
    paged = (*pages, run.store.block_table_BP[rows], start_B.contiguous(), step.length_B[rows].contiguous())
    query, length_BH = query[:, :, :, 0], segment.length_BH[rows]
    options = {**layer.options, "pseudo": pseudo}
    with run.observer.span("attention.fast", layer.index, moved):
        if layer.in_place:
            position_BHS = segment.position_BHS[rows]
            out = attention_in_place.on(by)(query, position_BHS, length_BH, *paged, **options)
        else:
            packed = segment.key_BHSD[rows], segment.value_BHSE[rows], length_BH
            out = sparse_attention.on(layer.backend)(query, *packed, *paged, **options)
    return out[:, :, :, None]
