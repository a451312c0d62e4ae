"""Variants of a slow step's selection, and of what moves rows of the cache: append, pack, recall."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from sfi_core.measure.kernel_bench import bytes_moved, gates
from sfi_core.measure.kernel_bench.data import SELECTOR, LayerData
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.append import append
from sfi_kernels.pack import pack
from sfi_kernels.recall import recall
from sfi_kernels.selector import selector
from sfi_kernels.top_k import top_k

FETCHED_EVERY = 4  # in a recall, every fourth selected row comes from the host


def scored(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield the Selector's scores of one query."""
    logits, inside = layer.evidence_BHGWT, layer.allowed_BT
    log_sum = logits.masked_fill(~inside[:, None, None, None], -torch.inf).logsumexp(-1)
    inputs = logits, layer.norm_BHT, inside
    call = partial(selector.on(layer.backend), *inputs, log_sum_BHGW=log_sum, **asdict(SELECTOR))
    moved = bytes_moved.selector_bytes(layer.settings)
    yield KernelVariant("selector", None, call, moved, lambda: gates.selector_error(call(), *inputs, SELECTOR))


def best(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield Top-K of the scores."""
    K, score = layer.settings.budget(retention), layer.score_BHT
    call = partial(top_k.on(layer.backend), score, K)
    moved = bytes_moved.top_k_bytes(layer.settings, K)
    yield KernelVariant("top_k", retention, call, moved, lambda: gates.top_k_error(score, call()))


def packed(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield the copy of the selected rows into a segment of its own."""
    into = layer.selected[retention].empty_like()
    call, index = partial(pack.on(layer.backend), *layer.pack_operands(into)), layer.packed_index(into)

    def error() -> float:
        into.poison()
        call()
        return gates.pack_error(into.segment, layer.key_BHTD, layer.value_BHTD, index)

    yield KernelVariant("pack", retention, call, bytes_moved.pack_bytes(layer.settings, index.shape[2]), error)


def recalled(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield a recall: the old segment has the sinks and three of four selected rows.

    Paper gap: the share of rows that stay selected depends on the model; we take three of four.
    """
    old, into = (layer.selected[retention].empty_like() for _ in range(2))
    K = old.index_BHK.shape[2]
    stays = old.index_BHK[..., torch.arange(K, device=layer.device) % FETCHED_EVERY != 0]
    stays = torch.nn.functional.pad(stays, (0, K - stays.shape[2]), value=-1)
    pack.on(layer.backend)(*layer.pack_operands(old._replace(index_BHK=stays)))
    fetched = torch.empty_like(into.length_BH)
    pages = torch.stack([rows.cpu() for rows in layer.paged[:2]], 2)  # FreeKV's layout, [P, H, 2, N, D]
    host = (pages.pin_memory() if old.key_BHSD.is_cuda else pages).unbind(2)
    rows = layer.block_table_BP, layer.request_B, into.index_BHK, layer.sink_B
    operands: tuple[Any, ...] = (*host, *rows, *old.segment, *into.segment, fetched)
    call = partial(recall.on(layer.backend), *operands)
    index, missing = layer.packed_index(into), -(-K // FETCHED_EVERY)

    def error() -> float:
        into.poison()
        call()
        wrong = gates.pack_error(into.segment, layer.key_BHTD, layer.value_BHTD, index)
        return max(wrong, gates.same(fetched, torch.full_like(fetched, missing)))

    moved = bytes_moved.recall_bytes(layer.settings, index.shape[2], index.shape[2] - missing)
    yield KernelVariant("recall", retention, call, moved, error)


def appended(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield the append of each request's last token again, so that the cache stays the same."""
    key, value = (x[:, :, -1:].clone() for x in (layer.key_BHTD, layer.value_BHTD))
    stored = layer.pages.key_PHND, layer.pages.value_PHNE, layer.pages.norm_PHN
    count = torch.ones_like(layer.length_B)
    operands = key, value, layer.length_B - 1, count, *stored, layer.block_table_BP
    call = partial(append.on(layer.backend), *operands)
    last, offset = layer.block_table_BP[:, -1].long(), (layer.settings.context - 1) % stored[0].shape[2]

    def error() -> float:
        for rows in stored:
            rows[last, :, offset] = torch.nan
        call()
        keys, values, norms = (rows[last, :, offset] for rows in stored)
        wrong = max(gates.same(keys, key[:, :, 0]), gates.same(values, value[:, :, 0]))
        return max(wrong, gates.norm_error(norms, key[:, :, 0]))

    yield KernelVariant("append", None, call, bytes_moved.append_bytes(layer.settings), error)
