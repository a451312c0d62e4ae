"""Stages 7 and 8: a layer's attention alone, of prompts and of decoding steps."""

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
from sfi_core.measure.kernel_bench import KernelSettings
from sfi_core.measure.kernel_bench.data import layer_data
from sfi_core.measure.kernel_bench.rivals import sdpa_backend
from sfi_core.measure.kernel_bench.timing import KernelTimes, clock_for
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_core.measure.kernel_bench.variants import KernelVariants
from sfi_kernels.dense_attention import dense_attention
from sfi_kernels.launch import launch, name_of

PROMPT, DECODE = (f"sfi_kernels.{op}_attention.triton" for op in ("dense", "decode"))


@contextmanager
def prompt_tile(rows: int, warps: int) -> Iterator[None]:
    """Let the prompt kernel take tiles of so many rows and warps; the one place that knows how."""
    with patch.multiple(import_module(PROMPT), ROWS=rows, WARPS=warps):
        yield


def prompts(journal: Journal, plan: Plan) -> None:
    """Time a causal prompt of one layer under every tile, and under SDPA."""
    heads, kv_heads, width = plan.layer
    for length in plan.prompts:
        settings = KernelSettings(
            heads=heads, kv_heads=kv_heads, head_dim=width, context=length, batch=1, dtype=plan.dtype,
            sink=1, recent=1, retentions=(1.0,),
        )  # fmt: skip
        data = layer_data(settings, plan.device, one_page=False)
        generator = torch.Generator(plan.device).manual_seed(2)
        shape = (1, kv_heads, settings.group, length, width)
        query = torch.randn(shape, generator=generator, dtype=plan.torch_dtype, device=plan.device)
        flat = query.flatten(1, 2)

        def theirs(flat: torch.Tensor = flat, data: Any = data) -> torch.Tensor:
            return scaled_dot_product_attention(
                flat, data.key_BHTD, data.value_BHTD, is_causal=True, enable_gqa=True
            )

        def ours(query: torch.Tensor = query, data: Any = data) -> torch.Tensor:
            operands = query, *data.paged, data.length_B
            return dense_attention.triton(*operands, scale=query.shape[-1] ** -0.5)

        journal.trial(f"{length} SDPA", partial(_rate, plan, theirs, query))
        expected = theirs()
        for rows, warps in plan.tiles:
            with prompt_tile(rows, warps):
                call = partial(_rate, plan, ours, query, expected)
                journal.trial(f"{length} rows={rows} warps={warps}", call)
        release(plan.device)


def _rate(
    plan: Plan,
    call: Callable[[], torch.Tensor],
    query: torch.Tensor,
    expected: torch.Tensor | None = None,
) -> dict[str, Any]:
    _, H, G, W, D = query.shape
    found: dict[str, Any] = {}
    if expected is None:
        found["ran_as"] = sdpa_backend(call)
    else:
        far = (call().view(expected.shape) - expected).abs().max() / expected.abs().max()
        found["roundings"] = float(far) / torch.finfo(query.dtype).eps
        found["right"] = found["roundings"] < 64  # noqa: PLR2004
    us = _time(plan, call)
    products = (
        4 * D * H * G * W * (W + 1) / 2
    )  # multiplied and added, keys and values, half of W x W
    return found | {"ms": us / 1e3, "tflop_per_s": products / us / 1e6}


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


def _time(plan: Plan, call: Callable[[], Any]) -> float:
    clock = clock_for(plan.device, "triton" if plan.graphs else "torch")
    return KernelTimes([*clock.time([clock.prepare(call)] * plan.repeats)]).median_us
