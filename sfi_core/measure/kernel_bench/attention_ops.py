"""Variants of a step's attention: dense beside its rivals, fast, verifying, and of mixed heads."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from sfi_core.measure.kernel_bench import bytes_moved, gates
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.rivals import rivals
from sfi_core.measure.kernel_bench.settings import VERIFIED
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.dense_attention import dense_attention
from sfi_kernels.sparse_attention import sparse_attention
from sfi_kernels.step_descriptor import FAST, SLOW

PAPER_TILE = 16  # tokens of a tile of `dense.paper_like`
DENSE_EVERY = 8  # of mixed heads, every eighth KV head reads all tokens


def dense(layer: LayerData, _: float) -> Iterator[KernelVariant]:
    """Yield attention to every token, and its rivals if it or `fast` was asked for."""
    settings, expected = layer.settings, layer.textbook()
    moved = bytes_moved.attention_bytes(settings, settings.context)

    def variant(name: str, call: Callable[[], Any], form: str | None = None, *, rival: bool = False) -> KernelVariant:
        return KernelVariant(name, 1.0, call, moved, lambda: expected.error(call(), rival=rival), form)

    if layer.backend == "torch":
        operands = layer.query_BHGD[:, :, :, None], *layer.paged, layer.length_B
        yield variant("dense", lambda: dense_attention.reference(*operands, scale=settings.scale)[:, :, :, 0])
    else:
        yield variant("dense", layer.attended(layer.plan(mode=SLOW, packed=0)))
        yield _slow_step(layer, "dense.evidence", layer.query_BHGD[:, :, :, None])
        one_split = layer.plan(mode=SLOW, packed=0, programs=settings.kv_heads)
        yield variant("dense.paper_like", layer.attended(one_split, block_n=PAPER_TILE))
    if {"fast", "dense"} & set(settings.ops):
        for name, form, call in rivals(layer):
            yield variant(name, call, form, rival=True)


def fast(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield a fast step; with the kernels also one that reads the selected rows in their pages."""
    settings, selected = layer.settings, layer.selected[retention]
    expected, tokens = layer.textbook(layer.packed_index(selected, recent=True)), settings.attended(retention)

    def variant(name: str, call: Callable[[], Any], gathered: int = 0) -> KernelVariant:
        moved = bytes_moved.attention_bytes(settings, tokens, gathered=gathered)
        return KernelVariant(name, retention, call, moved, lambda: expected.error(call()))

    if layer.backend == "torch":
        operands = *selected.packed, *layer.paged, layer.recent_start_B, layer.length_B
        yield variant("fast", lambda: sparse_attention.reference(layer.query_BHGD, *operands, scale=settings.scale))
        return
    rows = settings.sink + settings.budget(retention)
    planned = layer.plan(mode=FAST, packed=rows), *selected.packed
    yield variant("fast", layer.attended(*planned))
    yield variant("fast.gather", layer.attended(*planned, position_BHS=selected.position_BHS), rows)


def mixed_heads(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield a step in which some KV heads read every token, the others like a fast step."""
    settings, selected = layer.settings, layer.selected[retention]
    head = torch.arange(settings.kv_heads, device=layer.device)
    dense_BH = (head % DENSE_EVERY == 0).int().expand(settings.batch, -1).contiguous()
    plan = layer.plan(mode=FAST, packed=selected.key_BHSD.shape[2], mixed=True)
    call = layer.attended(plan, *selected.packed, dense_BH=dense_BH)
    sparse = layer.textbook(layer.packed_index(selected, recent=True))
    expected = layer.textbook().where(dense_BH[..., None, None] != 0, sparse)
    moved = bytes_moved.attention_bytes(settings, settings.attended(retention), dense=int(dense_BH[0].sum()))
    yield KernelVariant("mixed_heads", retention, call, moved, lambda: expected.error(call()))


def verify(layer: LayerData, _: float) -> Iterator[KernelVariant]:
    """Yield a verification for each number of queries in `VERIFIED`; with one query it is a slow step."""
    settings = layer.settings
    for count in VERIFIED:
        if count <= settings.context:
            form = f"{count} {'query' if count == 1 else 'queries'}"
            yield _slow_step(layer, "verify", layer.draw_queries(settings.batch, count), form)


def _slow_step(layer: LayerData, name: str, query_BHGWD: torch.Tensor, form: str | None = None) -> KernelVariant:
    # attention of W queries to every token, with the last one's evidence
    settings, W = layer.settings, query_BHGWD.shape[3]
    plan = layer.plan(mode=SLOW, packed=0, count=W)
    call = partial(layer.attend, plan, query_BHGWD=query_BHGWD, evidence=True)

    def error() -> float:
        # of the first, the middle and the last query, and of the last query's evidence
        result, last = call(), query_BHGWD[:, :, :, -1:]
        assert result.logits_BHGWT is not None, "evidence was asked for"
        pair = result.logits_BHGWT, layer.logits(last)
        wrong = gates.logits_error(*pair, last, layer.key_BHTD, settings.scale)
        places = {0, W // 2, W - 1}
        return max(wrong, layer.causal_error(result.out_BHGWE, query_BHGWD, places, settings.context))

    moved = bytes_moved.attention_bytes(settings, settings.context, evidence=True, queries=W)
    return KernelVariant(name, 1.0, call, moved, error, form)
