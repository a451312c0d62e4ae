"""What this machine is and what it can run, found out by trying."""

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sfi_core.errors import SfiError
from sfi_core.generation.generate import generate
from sfi_core.machine.memory import MEMINFO, free_bytes
from sfi_core.models.load import load
from sfi_core.settings.config import SfiConfig

CPUINFO = Path("/proc/cpuinfo")
TIMEOUT = 120  # seconds; the first Triton compilation takes a few


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried.

    Attributes:
        name: What.
        ok: Whether it works; None where it is not to be expected here.
        detail: What was seen.
    """

    name: str
    ok: bool | None
    detail: str


def describe() -> dict[str, Any]:
    """Name the machine: processor, cores, memory, GPUs."""
    cuda = torch.cuda.is_available()
    total = None
    if MEMINFO.exists():
        total = int(MEMINFO.read_text().split()[1]) * 1024
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total,
        "free_memory_bytes": free_bytes(torch.device("cpu")),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
        "cuda": torch.version.cuda,
    }


def checks() -> list[Check]:
    """Try what a run needs, one by one."""
    return [_cuda(), _backend("torch"), _triton(), _triton_backend(), _nvtx()]


def _processor() -> str:
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cuda() -> Check:
    if not torch.cuda.is_available():
        return Check("cuda", None, "no CUDA device; runs on the CPU")
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Check("cuda", True, f"{names}, CUDA {torch.version.cuda}")


def _backend(backend: str) -> Check:
    try:
        model, tokenizer = load()
        everything = SfiConfig(sink=1, recent=4, budget=64, t_max=4)
        prompt = (
            "Belora hid a red lantern under the old bridge. Question: What is written about Belora?"
        )
        options: dict[str, Any] = {"max_new_tokens": 12, "backend": backend}
        sfi = generate(model, tokenizer, [prompt], everything, **options)
        full = generate(model, tokenizer, [prompt], everything, policy="full-kv", **options)
    except SfiError as error:
        return Check(f"backend {backend}", False, str(error))
    same = sfi.report.requests[0].token_ids == full.report.requests[0].token_ids
    word = "equals" if same else "differs from"
    return Check(
        f"backend {backend}",
        same,
        f"sfi with everything selected {word} full attention on {model.device}",
    )


def _triton() -> Check:
    mode = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "sfi_kernels.triton_check"]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command,
            env={**os.environ, **mode},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check("triton", False, f"no answer within {TIMEOUT} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return Check("triton", False, lines[-1])
    return Check(
        "triton", True, "a kernel ran in the interpreter" if mode else "a kernel ran on the GPU"
    )


def _triton_backend() -> Check:
    if not torch.cuda.is_available():
        return Check("backend triton", None, "needs a CUDA device")
    return _backend("triton")


def _nvtx() -> Check:
    done = subprocess.run(
        [sys.executable, "-c", "import nvtx; nvtx.push_range('sfi'); nvtx.pop_range()"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Check(
        "nvtx",
        done.returncode == 0,
        "ranges can be pushed" if done.returncode == 0 else "not importable",
    )
