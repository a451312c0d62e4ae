"""Reading a request's whole history in a layer, wherever its store keeps it."""

from collections.abc import Sequence

import torch

from sfi_core.engine.layer import Layer
from sfi_kernels.dense_attention import dense_attention, window_logits
from sfi_kernels.dense_attention.reference import dense_attention_with_logits
from sfi_kernels.streamed_attention import (
    streamed_attention,
    streamed_attention_with_logits,
    streamed_logits,
)


def dense(layer: Layer, row: int, query_1HGWD: torch.Tensor) -> torch.Tensor:
    """Attend with a request's last W queries to everything before them, [1, H, G, W, E]."""
    store, length = layer.run.store, layer.run.requests[row].length
    if not store.whole_on_device:
        blocks = store.blocks(layer.index, row, length)
        return streamed_attention(query_1HGWD, blocks, length, **layer.options)
    return dense_attention.on(layer.backend)(
        query_1HGWD,
        layer.pages.key_PHND,
        layer.pages.value_PHNE,
        *_place(layer, row),
        **layer.options,
    )


def dense_with_logits(
    layer: Layer, row: int, query_1HG1D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as `dense` does with one query, and hand out its logits, [1, H, G, 1, T]: the evidence."""
    store = layer.run.store
    if not store.whole_on_device:
        blocks = store.blocks(layer.index, row, layer.run.requests[row].length)
        return streamed_attention_with_logits(query_1HG1D, blocks, **layer.options)
    return dense_attention_with_logits(
        query_1HG1D,
        layer.pages.key_PHND,
        layer.pages.value_PHNE,
        *_place(layer, row),
        **layer.options,
    )


def heads_with_logits(
    layer: Layer, row: int, query_1HG1D: torch.Tensor, heads: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to everything with some KV heads only; heads one by one, so that none is copied.

    Returns:
        out, [1, R, G, 1, E], and the logits of all heads, [1, H, G, 1, T]; -inf where a head is not asked.
    """
    store, length = layer.run.store, layer.run.requests[row].length
    _, H, G, _, _ = query_1HG1D.shape
    logits = query_1HG1D.new_full((1, H, G, 1, length), -torch.inf, dtype=torch.float32)
    sink_HG, outs = layer.options["sink_HG"], []
    for head in heads:
        one = slice(head, head + 1)
        own = None if sink_HG is None else sink_HG[one]
        out, logits[:, one] = streamed_attention_with_logits(
            query_1HG1D[:, one],
            store.blocks(layer.index, row, length, head),
            **layer.logit_options,
            sink_HG=own,
        )
        outs.append(out)
    return torch.cat(outs, 1), logits


def logits_of(layer: Layer, rows: Sequence[int], query_RHGWD: torch.Tensor) -> torch.Tensor:
    """Return the logits of some requests' last W queries, [R, H, G, W, T] float32."""
    run, chosen = layer.run, layer.run.rows(tuple(rows))
    if run.store.whole_on_device:
        return window_logits.on(layer.backend)(
            query_RHGWD,
            layer.pages.key_PHND,
            chosen.table_RP,
            chosen.length_R,
            **layer.logit_options,
            longest=chosen.longest,
        )
    made = query_RHGWD.new_full(
        (*query_RHGWD.shape[:4], chosen.longest), -torch.inf, dtype=torch.float32
    )
    for place, row in enumerate(rows):
        length = run.requests[row].length
        made[place : place + 1, ..., :length] = streamed_logits(
            query_RHGWD[place : place + 1],
            run.store.blocks(layer.index, row, length),
            length,
            **layer.logit_options,
        )
    return made


def _place(layer: Layer, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    one = slice(row, row + 1)
    return layer.run.store.block_table_BP[one], layer.forward.descriptor.length_B[one]
