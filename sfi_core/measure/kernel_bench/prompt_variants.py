"""Variants of a prompt's first and last piece, for one request; the rival is PyTorch's SDPA."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from sfi_core.measure.kernel_bench import bytes_moved, gates
from sfi_core.measure.kernel_bench.data import LayerData, draw_queries
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.variant import KernelVariant, reason
from sfi_kernels.dense_attention import dense_attention

CHECKED = 16  # queries of a piece that the check computes


def prompt_variants(
    settings: KernelSettings, data: LayerData, backend: str, notes: list[str]
) -> Iterator[KernelVariant]:
    """Yield the first piece of a prompt and the last piece, each followed by its rival."""
    device = data.query_BHGD.device
    first, last = settings.piece(device), settings.piece(device, last=True)
    for name, count, tokens in (("prompt", first, first), ("prompt.piece", last, settings.context)):
        query = draw_queries(settings, 1, count, device, seed=2)
        made = partial(_variant, settings, data, query, tokens)
        ours = partial(_attend, settings, data, backend, query, tokens)
        yield made(name, ours)
        rival = _rival(settings, data, query, tokens)
        try:
            rival()
        except (RuntimeError, ValueError, TypeError) as error:
            notes.append(f"{name}.sdpa does not run here: {reason(error)}")
            continue
        yield made(f"{name}.sdpa", rival, rival=True)


def checked_queries(count: int) -> list[int]:
    """Return the queries of a piece that are checked: evenly spread, including the first and the last."""
    return sorted({round(at * (count - 1) / (CHECKED - 1)) for at in range(CHECKED)})


def _variant(
    settings: KernelSettings,
    data: LayerData,
    query_1HGWD: torch.Tensor,
    tokens: int,
    name: str,
    call: Callable[[], torch.Tensor],
    *,
    rival: bool = False,
) -> KernelVariant:
    W = query_1HGWD.shape[3]

    def error() -> float:
        out_1HGWD, worst = call(), gates.EXACT
        for w in checked_queries(W):
            seen = slice(0, tokens - W + w + 1)
            key, value = data.key_BHTD[:1, :, seen], data.value_BHTD[:1, :, seen]
            expected = gates.textbook(query_1HGWD[:, :, :, w], key, value, settings.scale)
            worst = max(worst, expected.error(out_1HGWD[:, :, :, w], rival=rival))
        return worst

    return KernelVariant(
        name,
        None,
        call,
        bytes_moved.prompt_bytes(settings, W, tokens),
        error,
        form=f"{W:,} queries over {tokens:,} tokens",
        flops=bytes_moved.prompt_flops(settings, W, tokens),
        shape={"context": tokens, "batch": 1},
    )


def _attend(settings: KernelSettings, data: LayerData, backend: str, query: torch.Tensor, tokens: int) -> torch.Tensor:
    keys, values, table = data.paged
    length = torch.full_like(data.length_B[:1], tokens)
    out: torch.Tensor = dense_attention.on(backend)(query, keys, values, table[:1], length, scale=settings.scale)
    return out


def _rival(
    settings: KernelSettings, data: LayerData, query_1HGWD: torch.Tensor, tokens: int
) -> Callable[[], torch.Tensor]:
    W, heads = query_1HGWD.shape[3], query_1HGWD.flatten(1, 2)
    key, value = (x[:1, :, :tokens].contiguous() for x in (data.key_BHTD, data.value_BHTD))
    # a bias that PyTorch's flash attention does not materialize; a whole prompt needs none
    causal = {"is_causal": True} if tokens == W else {"attn_mask": causal_lower_right(W, tokens)}

    def call() -> torch.Tensor:
        out: torch.Tensor = scaled_dot_product_attention(
            heads, key, value, scale=settings.scale, enable_gqa=settings.group > 1, **causal
        )
        return out.view_as(query_1HGWD)

    return call
