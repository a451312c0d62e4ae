"""Attention of a layer in PyTorch, the reference: requests run one by one; neighbors that decode fast share calls."""

from collections.abc import Callable
from typing import TypeVar

import torch

from sfi_core.engine.layer import Layer
from sfi_core.engine.select import Handed, choose_and_note, hand_over
from sfi_kernels.compiled import fastest
from sfi_kernels.decode_attention import sparse_attention
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.step_descriptor import FAST, IDLE, PROMPT, sent

R = TypeVar("R")


def attend(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
    """Attend with the pass's queries; see `engine.attend.attend`."""
    batch_pass, alike, pseudo = layer.batch_pass, _alike(layer), None
    if layer.chooses and batch_pass.decodes:
        pseudo = choose_and_note(layer, batch_pass.descriptor, query_BHGTD[:, :, :, -1:])
    B, H, G, T, _ = query_BHGTD.shape
    if len(alike) == 1 and batch_pass.count == (T,) * B:
        return _attend(layer, alike[0], query_BHGTD, pseudo)
    out = query_BHGTD.new_zeros(B, H, G, T, layer.pages.value_PHNE.shape[3])
    for rows in alike:
        new = slice(T - batch_pass.count[rows.start], T)
        out[rows, :, :, new] = _attend(layer, rows, query_BHGTD[rows, :, :, new], pseudo and pseudo.of(rows))
    return out


def _attend(layer: Layer, rows: slice, query: torch.Tensor, pseudo: PseudoToken | None) -> torch.Tensor:
    kind, policy, row = layer.batch_pass.passes[rows.start].kind, layer.run.policy, rows.start
    if kind == PROMPT:
        out = _whole(layer, row, query, layer.dense)
        layer.check_prompt(row, query, out)
        return out
    if policy.mixes_heads and not layer.left_dense:
        return _mixed(layer, rows, query)
    if kind == FAST and not layer.left_dense:
        return _sparse(layer, rows, query, pseudo=pseudo)
    if layer.left_dense or not policy.refreshes():
        return _whole(layer, row, query, layer.verify)
    # the attention also returns the evidence's logits, which saves a pass over the keys
    out, logits = _whole(layer, row, query, layer.dense_with_logits)
    hand_over(layer, (row,), query[:, :, :, -1:], Handed(layer, logits))
    return out


def _alike(layer: Layer) -> list[slice]:
    # single rows, and ranges of neighbors that only attend sparsely
    policy, parts, last = layer.run.policy, list[slice](), IDLE
    shares = not (layer.left_dense or policy.mixes_heads)
    for row, request in enumerate(layer.batch_pass.passes):
        if shares and request.kind == last == FAST:
            parts[-1] = slice(parts[-1].start, row + 1)
        elif request.count:
            parts.append(slice(row, row + 1))
        last = request.kind
    return parts


def _whole(layer: Layer, row: int, query: torch.Tensor, attention: Callable[[int, torch.Tensor], R]) -> R:
    run, prompt = layer.run, layer.batch_pass.passes[row].kind == PROMPT
    if not prompt or layer.batch_pass.start[row]:  # a prompt's first piece reads nothing that was there before
        run.store.count_read(layer.index, run.requests[row].length)
    path = f"{layer.backend}.prefill_attention" if prompt else f"{layer.decodes_by(query)}.dense_attention"
    run.meter.count(path)
    with run.observer.span("attention.dense", layer.index, layer.moved_bytes((row,), dense=True)):
        return attention(row, query)


def _mixed(layer: Layer, rows: slice, query: torch.Tensor) -> torch.Tensor:
    # some KV heads read everything, the others the packed memory and the recent tokens; a slow step then selects anew
    run, row, logits = layer.run, rows.start, None
    state = run.requests[row]
    heads = layer.dense_heads[row] = run.policy.companion.dense_heads(layer.index, query.shape[1], slow=state.slow)
    out = _sparse(layer, rows, query, "mixed_attention")
    if heads:
        run.count_heads(layer.index, row)
        with run.observer.span("attention.heads", layer.index):
            dense, logits = layer.heads(row, query, heads, evidence=state.slow)
        for place, head in enumerate(heads):
            out[:, head] = dense[:, place]
    if logits is not None:
        hand_over(layer, (row,), query, Handed(layer, logits))
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
    *pages, table_BP, _ = layer.near
    packed = segment.key_BHSD[rows], segment.value_BHSE[rows], segment.length_BH[rows]
    by = fastest(layer.backend, query.device, *pages, *([] if layer.in_place else packed[:2]))
    run.meter.count(f"{by}.{path}", len(which))
    run.store.ready(layer.index)
    moved = layer.moved_bytes(which, dense=False)
    paged = (*pages, table_BP[rows], start_B.contiguous(), step.length_B[rows].contiguous())
    query = query[:, :, :, 0]
    options = {**layer.options, "pseudo": pseudo}
    with run.observer.span("attention.fast", layer.index, moved):
        position_BHS = segment.position_BHS[rows] if layer.in_place else None
        out = sparse_attention.on(by)(query, *packed, *paged, **options, position_BHS=position_BHS)
    return out[:, :, :, None]
