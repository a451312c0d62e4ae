"""Variants of verifications: dense passes of several queries a request, with the last query's evidence.

A verification of one query is a slow step, the base of comparison.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sfi_core.measure.kernel_bench import bytes_moved, gates
from sfi_core.measure.kernel_bench.data import LayerData, draw_queries, step_plan
from sfi_core.measure.kernel_bench.settings import VERIFIED, KernelSettings
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.decode_attention import DecodeAttention, decode_attention
from sfi_kernels.dense_attention import window_logits
from sfi_kernels.step_descriptor import SLOW


def verify_variants(
    settings: KernelSettings, data: LayerData, backend: str
) -> Iterator[KernelVariant]:
    """Yield a verification for each number of queries in `VERIFIED`, if the settings have `verify`."""
    for count in VERIFIED:
        if "verify" in settings.ops and count <= settings.context:
            yield _variant(settings, data, backend, count)


def _variant(settings: KernelSettings, data: LayerData, backend: str, count: int) -> KernelVariant:
    query_BHGWD = draw_queries(settings, settings.batch, count, data.length_B.device, seed=3)
    call = _call(settings, data, backend, query_BHGWD)
    moved = bytes_moved.attention_bytes(settings, settings.context, evidence=True, queries=count)
    return KernelVariant(
        "verify", 1.0, call, moved, partial(_error, settings, data, query_BHGWD, call),
        form=f"{count} {'query' if count == 1 else 'queries'}",
    )  # fmt: skip


def _call(
    settings: KernelSettings, data: LayerData, backend: str, query_BHGWD: torch.Tensor
) -> Callable[[], DecodeAttention]:
    count = query_BHGWD.shape[3]
    plan = step_plan(settings, backend, query_BHGWD.device, mode=SLOW, packed=0, count=count)
    row = data.key_BHTD[:, :, :1].contiguous()  # a slow step reads no packed rows
    packed = row, row, data.length_B.new_zeros(row.shape[:2])
    attend = partial(decode_attention.on(backend), query_BHGWD, *packed, *data.paged, plan)
    return partial(attend, scale=settings.scale, evidence=True)


def _error(
    settings: KernelSettings,
    data: LayerData,
    query_BHGWD: torch.Tensor,
    call: Callable[[], DecodeAttention],
) -> float:
    # of the first, the middle and the last query, and of the last query's evidence
    result, W = call(), query_BHGWD.shape[3]
    assert result.logits_BHGWT is not None, "evidence was asked for"
    key, _, table = data.paged
    logits = window_logits.reference(
        query_BHGWD[:, :, :, -1:], key, table, data.length_B, scale=settings.scale
    )
    last = query_BHGWD[:, :, :, -1]
    worst = gates.logits_error(result.logits_BHGWT, logits, last, data.key_BHTD, settings.scale)
    for w in sorted({0, W // 2, W - 1}):
        seen = slice(0, settings.context - W + w + 1)
        keys, values = data.key_BHTD[:, :, seen], data.value_BHTD[:, :, seen]
        expected = gates.textbook(query_BHGWD[:, :, :, w], keys, values, settings.scale)
        worst = max(worst, expected.error(result.out_BHGWE[:, :, :, w]))
    return worst
