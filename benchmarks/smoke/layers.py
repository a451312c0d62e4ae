"""Stage 7: a layer's attention to a prompt."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.smoke.journal import Journal
from benchmarks.smoke.plan import Plan
from sfi_core.measure.bench.bench import release
from sfi_core.measure.kernel_bench.attention_cases import sdpa_backend
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.timing import clock_for
from sfi_kernels.attention_tile import QueryTile
from sfi_kernels.dense_attention.triton import dense_attention

ROUNDINGS = 64  # of the largest number, that two attentions may differ by


def prompts(journal: Journal, plan: Plan) -> None:
    """Time a causal prompt of one layer under SDPA, and under every tile of ours."""
    heads, kv_heads, width = plan.layer
    for length in plan.prompts:
        settings = KernelSettings(
            heads=heads, kv_heads=kv_heads, head_dim=width, context=length, batch=1, dtype=plan.dtype,
            sink=1, recent=1, retentions=(1.0,),
        )  # fmt: skip
        prompt = Prompt(plan, settings)
        journal.trial(f"{length} SDPA", prompt.time_theirs)
        for tile in plan.tiles:
            journal.trial(f"{length} {tile}", partial(prompt.time_ours, tile))
        del prompt
        release(plan.device)


class Prompt:
    """A causal prompt of one layer, as our kernel and as SDPA read it."""

    def __init__(self, plan: Plan, settings: KernelSettings) -> None:
        self._plan, self._scale = plan, settings.scale
        self._data = LayerData(settings, "triton", plan.device)
        generator = torch.Generator(plan.device).manual_seed(2)
        shape = (1, settings.kv_heads, settings.group, settings.context, settings.head_dim)
        self._query = torch.randn(shape, generator=generator, dtype=plan.torch_dtype, device=plan.device)
        self._expected: torch.Tensor | None = None

    def time_theirs(self) -> dict[str, Any]:
        """Time SDPA; its result is what ours is compared with."""
        self._expected = self._theirs()
        return {"ran_as": sdpa_backend(self._theirs), **self._rate(self._theirs)}

    def time_ours(self, tile: QueryTile) -> dict[str, Any]:
        """Compare our kernel with SDPA where that ran, in roundings of the largest number, and time it."""
        row: dict[str, Any] = {}
        if self._expected is not None:
            far = (self._ours(tile).view(self._expected.shape) - self._expected).abs().max()
            share = float(far / self._expected.abs().max())
            row["roundings"] = share / torch.finfo(self._query.dtype).eps
            row["right"] = row["roundings"] < ROUNDINGS
        return row | self._rate(partial(self._ours, tile))

    def _theirs(self) -> torch.Tensor:
        data = self._data
        return scaled_dot_product_attention(
            self._query.flatten(1, 2), data.key_BHTD, data.value_BHTD, is_causal=True, enable_gqa=True
        )

    def _ours(self, tile: QueryTile) -> torch.Tensor:
        operands = self._query, *self._data.paged, self._data.length_B
        return dense_attention(*operands, scale=self._scale, shape=tile)

    def _rate(self, call: Callable[[], torch.Tensor]) -> dict[str, Any]:
        _, H, G, W, D = self._query.shape
        clock = clock_for(self._plan.device, "torch")  # milliseconds: a launch does not count
        us = statistics.median(clock.time([clock.prepare(call)] * self._plan.repeats))
        products = 4 * D * H * G * W * (W + 1) / 2  # multiply and add, keys and values, half of W x W
        return {"ms": us / 1e3, "tflop_per_s": products / us / 1e6}
