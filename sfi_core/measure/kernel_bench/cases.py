"""The variants that the benchmark runs: a table of all ops, and those that are no attention."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import torch

from sfi_core.measure.kernel_bench import gates
from sfi_core.measure.kernel_bench.attention_cases import codescan, dense, fast, mixed_heads, prompt, verify
from sfi_core.measure.kernel_bench.data import SELECTOR, LayerData
from sfi_core.measure.kernel_bench.gates import KernelVariant, checked
from sfi_core.measure.kernel_bench.settings import FLOAT32, INT32, RETAINING
from sfi_kernels.fused import Appending, add_rms_norm, rotary, silu_mul
from sfi_kernels.op import Op
from sfi_kernels.pack import append, pack, recall
from sfi_kernels.products import MOST_ROWS, project
from sfi_kernels.selector import selector
from sfi_kernels.top_k import top_k

FETCHED_EVERY = 4  # in a recall, every fourth selected row comes from the host
EPS = 1e-6  # of the norms

Make = Callable[[LayerData, Any], Iterator[KernelVariant]]


def scored(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield the Selector's scores of one query."""
    logits, inside, settings = layer.evidence_BHGWT, layer.allowed_BT, layer.settings
    log_sum = logits.masked_fill(~inside[:, None, None, None], -torch.inf).logsumexp(-1)
    inputs = logits, layer.norm_BHT, inside
    call = partial(selector.on(layer.backend), *inputs, log_sum_BHGW=log_sum, **asdict(SELECTOR))
    positions = settings.batch * settings.context
    moved = positions * (settings.heads + 2 * settings.kv_heads) * FLOAT32 + positions
    yield KernelVariant("selector", None, call, moved, lambda: gates.selector_error(call(), *inputs, SELECTOR))


def best(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield Top-K of the scores."""
    settings, score = layer.settings, layer.score_BHT
    K = settings.budget(retention)
    call = partial(top_k.on(layer.backend), score, K)
    moved = settings.pairs * (settings.context * FLOAT32 + K * INT32)
    yield KernelVariant("top_k", retention, call, moved, lambda: gates.top_k_error(score, call()))


def packed(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield the copy of the selected rows into a segment of its own."""
    into = layer.selected[retention].empty_like()
    call, index = partial(pack.on(layer.backend), *layer.pack_operands(into)), layer.packed_index(into)

    def error() -> float:
        into.poison()
        call()
        return gates.pack_error(into.segment, layer.key_BHTD, layer.value_BHTD, index)

    yield KernelVariant("pack", retention, call, layer.settings.pack_bytes(index.shape[2]), error)


def recalled(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield a recall whose old segment has the sinks and three of four selected rows (Paper gap: our share)."""
    old, into = (layer.selected[retention].empty_like() for _ in range(2))
    K = old.index_BHK.shape[2]
    stays = old.index_BHK[..., torch.arange(K, device=layer.device) % FETCHED_EVERY != 0]
    stays = torch.nn.functional.pad(stays, (0, K - stays.shape[2]), value=-1)
    pack.on(layer.backend)(*layer.pack_operands(old._replace(index_BHK=stays)))
    fetched = torch.empty_like(into.length_BH)
    host = layer.hosted[0][:2]
    rows = layer.block_table_BP, layer.request_B, into.index_BHK, layer.sink_B
    operands: tuple[Any, ...] = (*host, *rows, *old.segment, *into.segment, fetched)
    call = partial(recall.on(layer.backend), *operands)
    index, missing = layer.packed_index(into), -(-K // FETCHED_EVERY)

    def error() -> float:
        into.poison()
        call()
        wrong = gates.pack_error(into.segment, layer.key_BHTD, layer.value_BHTD, index)
        return max(wrong, gates.same(fetched, torch.full_like(fetched, missing)))

    # the positions that are wanted, and those of the old rows
    positions = layer.settings.pairs * (K + index.shape[2] - missing) * INT32
    moved = layer.settings.pack_bytes(index.shape[2]) + positions
    yield KernelVariant("recall", retention, call, moved, error)


def appended(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield the append of each request's last token again, so that the cache stays the same; also to both tiers."""
    key, value = (x[:, :, -1:].clone() for x in (layer.key_BHTD, layer.value_BHTD))
    count, page_size = torch.ones_like(layer.length_B), layer.pages.key_PHND.shape[2]
    last, offset = layer.block_table_BP[:, -1].long(), (layer.settings.context - 1) % page_size

    def variant(name: str, pages: Sequence[torch.Tensor], times: int, **options: Any) -> KernelVariant:
        stored = *pages, layer.pages.norm_PHN
        operands = key, value, layer.length_B - 1, count, *stored, layer.block_table_BP
        call = partial(append.on(layer.backend), *operands, **options)

        def error() -> float:
            for rows in stored:
                rows[last.to(rows.device), :, offset] = torch.nan
            call()
            if layer.device.type == "cuda":  # or the host would read its pages too soon
                torch.cuda.synchronize(layer.device)
            keys, values, norms = (rows[last.to(rows.device), :, offset].to(layer.device) for rows in stored)
            wrong = max(gates.same(keys, key[:, :, 0]), gates.same(values, value[:, :, 0]))
            expected = key[:, :, 0].double().square().sum(-1).sqrt()
            # a sum of D squares is off by at most D roundings, its root by D / 2
            allowed = (key.shape[-1] / 2 + 2) * torch.finfo(torch.float32).eps * expected
            return max(wrong, gates.share((norms.double() - expected).abs(), allowed))

        return KernelVariant(name, None, call, times * layer.settings.append_bytes(), error)

    yield variant("append", layer.pages.tensors[:2], 1)
    if layer.backend == "triton":
        host, ring = layer.hosted
        yield variant("append.host", host[:2], 2, ring=ring)


def norm(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield a residual's sum and its RMS norm; a row is as wide as all query heads."""
    B, F = layer.settings.batch, layer.settings.heads * layer.settings.head_dim
    operands = layer.draw(B, F), layer.draw(B, F), layer.draw(F), EPS
    yield _fused(layer, "rms_norm", add_rms_norm, operands, 4 * B * F + F)


def rotation(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield the norm of a token's queries and keys, and their rotation, without and with the append."""
    settings = layer.settings
    B, D = settings.batch, settings.head_dim
    query, key = layer.draw(B, 1, settings.heads, D), layer.draw(B, 1, settings.kv_heads, D)
    angle, weight = layer.draw(B, 1, D // 2).repeat(1, 1, 2), layer.draw(D)
    operands = query, key, angle.cos(), angle.sin(), weight, weight, EPS
    numbers = query.numel() + key.numel() + angle.numel() + D
    yield _fused(layer, "rotary", rotary, operands, 2 * numbers, gates.pair_sizes)
    if layer.backend == "triton":
        yield _rotated_and_appended(layer, operands, 2 * numbers)


def _rotated_and_appended(layer: LayerData, operands: tuple[Any, ...], numbers: int) -> KernelVariant:
    # to the first place of a page of each request's own
    settings, value = layer.settings, layer.value_BHTD[:, :, -1:].transpose(1, 2)
    key, values, norms = [pages.new_empty(settings.batch, *pages.shape[1:]) for pages in layer.pages.tensors]
    first = layer.request_B.clone()
    places = Appending(value, torch.zeros_like(first), torch.ones_like(first), key, values, norms, first[:, None])
    rotate: Callable[..., Any] = rotary.triton
    call = partial(rotate, *operands, places)

    def error() -> float:
        call()
        expected = rotate(*operands)[1][:, :, 0], value[:, 0]
        return max(gates.same(pages[:, :, 0], rows) for pages, rows in zip((key, values), expected, strict=True))

    return KernelVariant("rotary.append", None, call, numbers * settings.itemsize + settings.append_bytes(), error)


def gate(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield the gate of a feed-forward layer; a row is as wide as all query heads."""
    B, F = layer.settings.batch, layer.settings.heads * layer.settings.head_dim
    yield _fused(layer, "silu_mul", silu_mul, (layer.draw(B, F), layer.draw(B, F)), 3 * B * F)


def product(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield an output's product with the residual's sum, for up to 16 tokens, and PyTorch's two operations."""
    B, F = min(layer.settings.batch, MOST_ROWS), layer.settings.heads * layer.settings.head_dim
    rows, weight, residual = layer.draw(B, F), layer.draw(F, F), layer.draw(B, F)
    operands = rows, weight, None, None, 0.0, residual

    def sizes(_: torch.Tensor) -> torch.Tensor:
        return rows.double().abs() @ weight.double().abs().T + residual.abs()

    for name, backend in (("project", layer.backend), ("project.torch", "torch")):
        yield _fused(layer, name, project, operands, (F + 3 * B) * F, sizes, backend)


def _fused(
    layer: LayerData, name: str, op: Op[..., Any], operands: tuple[Any, ...], numbers: int,
    sizes: Callable[[torch.Tensor], torch.Tensor] = torch.abs, backend: str | None = None,
) -> KernelVariant:  # fmt: skip
    # an op on one token of every request that moves `numbers` numbers; `sizes` are those that its sums round at
    call = partial(op.on(backend or layer.backend), *operands)

    def error() -> float:
        expected = op.reference(*(x.double() if isinstance(x, torch.Tensor) else x for x in operands))
        pairs = zip(call(), expected, strict=True) if isinstance(expected, tuple) else [(call(), expected)]
        return max(gates.rounding_error(*pair, sizes) for pair in pairs)

    return KernelVariant(name, None, call, numbers * layer.settings.itemsize, error)


# by title, the ops that take turns, and what makes the variants of each for a retention
GROUPS: dict[str, dict[str, Make]] = {
    "Attention of a step": {"dense": dense, "fast": fast},
    "Attention of verifications and of mixed heads": {"verify": verify, "mixed_heads": mixed_heads},
    "Selection of a slow step": {"selector": scored, "top_k": best, "pack": packed},
    "A step of CodeScan": {"codescan": codescan},
    "The cache": {"append": appended, "recall": recalled},
    "Attention of a prompt": {"prompt": prompt},
    "The rest of a layer": {"rms_norm": norm, "rotary": rotation, "silu_mul": gate, "project": product},
}


def groups(layer: LayerData) -> Iterator[tuple[str, Iterator[KernelVariant]]]:
    """Yield each title with the checked variants of the settings' ops; dense attention is always among them."""
    for title, ops in GROUPS.items():
        variants = [
            checked(op, retention, make(layer, retention))
            for op, make in ops.items()
            if op == "dense" or op in layer.settings.ops
            for retention in (layer.settings.retentions if op in RETAINING else (None,))
        ]
        if variants:
            yield title, chain.from_iterable(variants)
