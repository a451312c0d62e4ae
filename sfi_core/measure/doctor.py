"""Tries what this machine can run."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sfi_core.errors import SfiError
from sfi_core.generation.generate import generate
from sfi_core.models.load import load
from sfi_core.policies import policy_class
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import EngineOptions
from sfi_core.settings.policy_names import installed, package_of
from sfi_kernels.compiled import why_not

PROMPTS = ((3, 64), (70, 64), (300, 128), (1100, 64))  # lengths, and widths of a head
ROUNDINGS = 16  # of numbers up to 4: queries, keys, values and weights are rounded
TIMEOUT = 120  # seconds; the first Triton compilation takes a few
TRITON = """
import torch
from sfi_kernels.fused import silu_mul
row = torch.arange(64.0, device="cuda" if torch.cuda.is_available() else "cpu")[None]
out = silu_mul.triton(row, row)
assert torch.allclose(out, silu_mul.reference(row, row)), f"a Triton kernel gave {out[0, :4].tolist()}"
"""


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of a check; `ok` is None on a machine that lacks the hardware."""

    name: str
    ok: bool | None
    detail: str


def checks() -> list[Check]:
    """Check everything that a run may need."""
    missing = Check("backend triton", None, "needs a CUDA device")
    triton = _backend("triton") if torch.cuda.is_available() else missing
    return [_cuda(), _backend("torch"), *_prompts(), _numba(), _triton(), triton, *_policies()]


def _policies() -> Iterator[Check]:
    for point in installed():
        try:
            kind = policy_class(point.name)
        except SfiError as error:
            yield Check(f"policy {point.name}", False, str(error))
        else:
            where = f"{kind.__module__}.{kind.__qualname__} of package {package_of(point)}"
            yield Check(f"policy {point.name}", True, where)


def _cuda() -> Check:
    if not torch.cuda.is_available():
        return Check("cuda", None, "no CUDA device; runs on the CPU")
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Check("cuda", True, f"{names}, CUDA {torch.version.cuda}")


def _backend(backend: str) -> Check:
    try:
        model, tokenizer = load()
        everything = SfiConfig(sink=1, recent=4, budget=64, t_max=4)
        prompt = "Belora hid a red lantern under the old bridge. Question: What is written about Belora?"
        options: dict[str, Any] = {"max_new_tokens": 12, "engine": EngineOptions(backend=backend)}
        sfi = generate(model, tokenizer, [prompt], everything, **options)
        full = generate(model, tokenizer, [prompt], everything, policy="full-kv", **options)
    except SfiError as error:
        return Check(f"backend {backend}", False, str(error))
    same = sfi.report.requests[0].token_ids == full.report.requests[0].token_ids
    word = "equals" if same else "differs from"
    detail = f"sfi with everything selected {word} full attention on {model.device}"
    return Check(f"backend {backend}", same, detail)


def _prompts() -> Iterator[Check]:
    """Compare PyTorch's attention to prompts on this processor, in shorter dtypes, with float32's."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        off = 0.0
        for length, width in PROMPTS:
            query, key, value = torch.randn(3, 1, 2, length, width, generator=generator)
            got, wanted = (
                scaled_dot_product_attention(query.to(kind), key.to(kind), value.to(kind), is_causal=True).float()
                for kind in (dtype, torch.float32)
            )
            off = max(off, float((got - wanted).abs().max().nan_to_num(nan=torch.inf)))
        name = str(dtype).removeprefix("torch.")
        if not math.isfinite(off):
            yield Check(
                f"prompt {name}", False, "PyTorch's attention gives NaN or infinity here; load models in float32"
            )
        else:
            right = off < ROUNDINGS * torch.finfo(dtype).eps
            yield Check(f"prompt {name}", right, f"attention on the CPU is within {off:.2g} of float32's")


def _numba() -> Check:
    missing = why_not()
    if missing:  # PyTorch does the same; only a numba that is there but does not work is a fault
        slower = "codescan and quest run in PyTorch, slower"
        return Check("numba", None if missing == "not installed" else False, f"{missing}; {slower}")
    from sfi_kernels.loops import attention  # noqa: PLC0415 - needs numba

    folder = attention.attend.stats.cache_path
    detail = f"code is kept in {folder}" if folder else "no folder for code can be written, so every run compiles"
    return Check("numba", True, f"compiles codescan's and quest's steps; {detail}")


def _triton() -> Check:
    mode = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", TRITON]  # in its own process, which chooses the interpreter once
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, env={**os.environ, **mode}, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("triton", False, f"no answer within {TIMEOUT} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return Check("triton", False, lines[-1])
    return Check("triton", True, f"a kernel ran {'in the interpreter' if mode else 'on the GPU'}")
