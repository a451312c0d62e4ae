"""Variants of mixed heads, verifications and recall."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sfi_core.measure.kernel_bench import bytes_moved, gates
from sfi_core.measure.kernel_bench.data import LayerData, Selected, draw_queries, step_plan
from sfi_core.measure.kernel_bench.settings import VERIFIED, KernelSettings
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.decode_attention import DecodeAttention, decode_attention
from sfi_kernels.dense_attention import window_logits
from sfi_kernels.pack import pack
from sfi_kernels.recall import recall
from sfi_kernels.step_descriptor import FAST, SLOW

DENSE_EVERY = 8  # of mixed heads, every eighth KV head reads all tokens
FETCHED_EVERY = 4  # in a recall, every fourth selected row comes from the host


def mixed_heads_variant(
    settings: KernelSettings, data: LayerData, selected: Selected, retention: float, backend: str
) -> Iterator[KernelVariant]:
    """Yield the variant; pack `selected` before the variant is called."""
    dense_BH = dense_heads(settings, data.length_B.device)
    rows = selected.key_BHSD.shape[2]
    plan = step_plan(settings, backend, dense_BH.device, mode=FAST, packed=rows, mixed=True)
    packed = selected.key_BHSD, selected.value_BHSD, selected.length_BH
    attend, query_BHG1D = decode_attention.on(backend), data.query_BHGD[:, :, :, None]

    def call() -> torch.Tensor:
        return attend(query_BHG1D, *packed, *data.paged, plan, scale=settings.scale, dense_BH=dense_BH).out_BHGWE[
            :, :, :, 0
        ]

    start = settings.context - settings.recent
    index = gates.attended(selected.index_BHK, settings.sink, start, settings.context)
    operands = data.query_BHGD, data.key_BHTD, data.value_BHTD, settings.scale
    expected = gates.textbook(*operands).where(dense_BH[..., None, None] != 0, gates.textbook(*operands, index))
    attended, dense = settings.attended(retention), int(dense_BH[0].sum())
    moved = bytes_moved.attention_bytes(settings, attended, dense=dense)
    yield KernelVariant("mixed_heads", retention, call, moved, lambda: expected.error(call()))


def dense_heads(settings: KernelSettings, device: torch.device) -> torch.Tensor:
    """Return the marks of dense heads, [B, H] int32: 1 for the first head of every eight."""
    head = torch.arange(settings.kv_heads, device=device)
    return (head % DENSE_EVERY == 0).int().expand(settings.batch, -1).contiguous()


def verify_variants(settings: KernelSettings, data: LayerData, backend: str) -> Iterator[KernelVariant]:
    """Yield a verification for each number of queries in `VERIFIED`, if the settings have `verify`.

    It is a dense pass of several queries with the last one's evidence; with one query it is a slow step.
    """
    for count in VERIFIED:
        if "verify" in settings.ops and count <= settings.context:
            yield _verification(settings, data, backend, count)


def _verification(settings: KernelSettings, data: LayerData, backend: str, count: int) -> KernelVariant:
    query_BHGWD = draw_queries(settings, settings.batch, count, data.length_B.device, seed=3)
    plan = step_plan(settings, backend, data.length_B.device, mode=SLOW, packed=0, count=count)
    attend = partial(decode_attention.on(backend), query_BHGWD, *data.nothing, *data.paged, plan)
    call: Callable[[], DecodeAttention] = partial(attend, scale=settings.scale, evidence=True)
    moved = bytes_moved.attention_bytes(settings, settings.context, evidence=True, queries=count)
    return KernelVariant(
        "verify", 1.0, call, moved, partial(_verify_error, settings, data, query_BHGWD, call),
        form=f"{count} {'query' if count == 1 else 'queries'}",
    )  # fmt: skip


def _verify_error(
    settings: KernelSettings, data: LayerData, query_BHGWD: torch.Tensor, call: Callable[[], DecodeAttention]
) -> float:
    # of the first, the middle and the last query, and of the last query's evidence
    result, W = call(), query_BHGWD.shape[3]
    assert result.logits_BHGWT is not None, "evidence was asked for"
    key, _, table = data.paged
    logits = window_logits.reference(query_BHGWD[:, :, :, -1:], key, table, data.length_B, scale=settings.scale)
    last = query_BHGWD[:, :, :, -1]
    worst = gates.logits_error(result.logits_BHGWT, logits, last, data.key_BHTD, settings.scale)
    for w in sorted({0, W // 2, W - 1}):
        seen = slice(0, settings.context - W + w + 1)
        keys, values = data.key_BHTD[:, :, seen], data.value_BHTD[:, :, seen]
        expected = gates.textbook(query_BHGWD[:, :, :, w], keys, values, settings.scale)
        worst = max(worst, expected.error(result.out_BHGWE[:, :, :, w]))
    return worst


def recall_variant(
    settings: KernelSettings, data: LayerData, selected: Selected, retention: float, backend: str
) -> Iterator[KernelVariant]:
    """Yield the variant: the old segment has the sinks and three of four selected rows.

    Paper gap: the share of rows that stay selected depends on the model; we take three of four.
    """
    pages = host_pages(data)
    request = torch.arange(settings.batch, dtype=torch.int32, device=data.length_B.device)
    sink = torch.full_like(request, settings.sink)
    old = selected.empty_like()
    kept = _without_each_fourth(selected.index_BHK)
    pack.on(backend)(*data.paged, request, kept, sink, *old.segment)
    into, fetched = selected.empty_like(), torch.empty_like(selected.length_BH)
    call = partial(
        recall.on(backend), *pages, data.block_table_BP, request, selected.index_BHK, sink,
        *old.segment, *into.segment, fetched,
    )  # fmt: skip
    index = gates.attended(selected.index_BHK, settings.sink, 0, 0)
    missing = torch.full_like(fetched, -(-selected.index_BHK.shape[2] // FETCHED_EVERY))

    def error() -> float:
        into.poison()
        call()
        wrong = gates.pack_error(into.segment, data.key_BHTD, data.value_BHTD, index)
        return max(wrong, gates.same(fetched, missing))

    moved = bytes_moved.recall_bytes(settings, index.shape[2], index.shape[2] - int(missing[0, 0]))
    yield KernelVariant("recall", retention, call, moved, error)


def host_pages(data: LayerData) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the pages to the host in FreeKV's layout, [P, H, 2, N, D]; pinned for a CUDA device."""
    key_PHND, value_PHNE, _ = data.paged
    P, H, N, D = key_PHND.shape
    pages = torch.empty(P, H, 2, N, D, dtype=key_PHND.dtype, pin_memory=key_PHND.is_cuda)
    pages[:, :, 0], pages[:, :, 1] = key_PHND, value_PHNE
    return pages[:, :, 0], pages[:, :, 1]


def _without_each_fourth(index_BHK: torch.Tensor) -> torch.Tensor:
    K = index_BHK.shape[2]
    kept = index_BHK[..., torch.arange(K, device=index_BHK.device) % FETCHED_EVERY != 0]
    return torch.nn.functional.pad(kept, (0, K - kept.shape[2]), value=-1)
