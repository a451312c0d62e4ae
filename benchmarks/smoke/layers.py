"""Stages 7 and 8: a layer's attention alone, of prompts and of decoding steps."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.smoke.journal import Journal
from benchmarks.smoke.plan import Plan
from sfi_core.measure.bench.bench import release
from sfi_core.measure.kernel_bench.data import layer_data
from sfi_core.measure.kernel_bench.rivals import sdpa_backend
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.timing import clock_for
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_core.measure.kernel_bench.variants import KernelVariants
from sfi_kernels.dense_attention.prompt_tile import PromptTile
from sfi_kernels.dense_attention.triton import attend
from sfi_kernels.launch import launch, name_of

ROUNDINGS = 64  # of the largest number, that two attentions may differ by
DECODE = "sfi_kernels.decode_attention.triton"


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
        self._data = layer_data(settings, plan.device, one_page=False)
        generator = torch.Generator(plan.device).manual_seed(2)
        shape = (1, settings.kv_heads, settings.group, settings.context, settings.head_dim)
        self._query = torch.randn(
            shape, generator=generator, dtype=plan.torch_dtype, device=plan.device
        )
        self._expected: torch.Tensor | None = None

    def time_theirs(self) -> dict[str, Any]:
        """Time SDPA; its result is what ours is compared with."""
        self._expected = self._theirs()
        return {"ran_as": sdpa_backend(self._theirs), **self._rate(self._theirs)}

    def time_ours(self, tile: PromptTile) -> dict[str, Any]:
        """Compare our kernel with SDPA where that ran, in roundings of the largest number, and time it."""
        found: dict[str, Any] = {}
        if self._expected is not None:
            far = (self._ours(tile).view(self._expected.shape) - self._expected).abs().max()
            share = float(far / self._expected.abs().max())
            found["roundings"] = share / torch.finfo(self._query.dtype).eps
            found["right"] = found["roundings"] < ROUNDINGS
        return found | self._rate(partial(self._ours, tile))

    def _theirs(self) -> torch.Tensor:
        data = self._data
        return scaled_dot_product_attention(
            self._query.flatten(1, 2),
            data.key_BHTD,
            data.value_BHTD,
            is_causal=True,
            enable_gqa=True,
        )

    def _ours(self, tile: PromptTile) -> torch.Tensor:
        operands = self._query, *self._data.paged, self._data.length_B
        return attend(*operands, scale=self._scale, shape=tile)

    def _rate(self, call: Callable[[], torch.Tensor]) -> dict[str, Any]:
        _, H, G, W, D = self._query.shape
        us = _time(self._plan, call, "torch")  # milliseconds: a launch does not count
        products = (
            4 * D * H * G * W * (W + 1) / 2
        )  # multiply and add, keys and values, half of W x W
        return {"ms": us / 1e3, "tflop_per_s": products / us / 1e6}


def splits(journal: Journal, plan: Plan) -> None:
    """Time the split kernel, fast and dense, at each depth of its pipeline, with and without the join."""
    heads, kv_heads, width = plan.layer
    for batch in plan.batches:
        settings = KernelSettings(
            heads=heads, kv_heads=kv_heads, head_dim=width, context=plan.cached, batch=batch,
            dtype=plan.dtype, ops=("fast",), retentions=(plan.selected / plan.cached,),
        )  # fmt: skip
        for stages in plan.stages:
            with pipeline(stages):
                for variant in KernelVariants(settings, "triton", plan.device).build():
                    if variant.name not in ("dense", "fast"):
                        continue
                    at = f"{plan.cached} x {batch}, {stages} stages, {variant.name}"
                    journal.trial(at, partial(_split, plan, variant))
        release(plan.device)


def _split(plan: Plan, variant: KernelVariant) -> dict[str, Any]:
    whole = _time(plan, variant.call)
    found = {"error_share": variant.error(), "us": whole}
    with without_join():
        alone = _time(plan, variant.call)
    return found | {"split_us": alone, "split_tb_per_s": variant.bytes / alone / 1e6}


@contextmanager
def pipeline(stages: int) -> Iterator[None]:
    """Let the split kernel have so many tiles in flight."""
    module = import_module(DECODE)
    chosen = module.tile_shape
    with patch.object(module, "tile_shape", lambda *a: replace(chosen(*a), stages=stages)):
        yield


@contextmanager
def without_join() -> Iterator[None]:
    """Leave the join out; the result is wrong then."""

    def only_split(kernel: Any, *arguments: Any, **options: Any) -> None:
        if not name_of(kernel).startswith("join"):
            launch(kernel, *arguments, **options)

    with patch.object(import_module(DECODE), "launch", only_split):
        yield


def _time(plan: Plan, call: Callable[[], Any], backend: str = "triton") -> float:
    clock = clock_for(plan.device, backend if plan.graphs else "torch")
    return statistics.median(clock.time([clock.prepare(call)] * plan.repeats))
