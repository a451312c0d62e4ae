"""The machine of a benchmark, in the words that a result needs to be compared with another."""

import re
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import torch

from sfi_core.machine.describe import describe
from sfi_core.machine.versions import versions

DRIVER = Path("/proc/driver/nvidia/version")


def describe_machine(device: torch.device | None = None) -> dict[str, Any]:
    """Name the machine, the device that was measured, and what drives it."""
    found = versions()
    machine = {
        **describe(),
        "device": None if device is None else str(device),
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": found["triton"],
    }
    if device is not None and device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "gpu": properties.name,
            "processors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return machine


def name(machine: dict[str, Any]) -> str:
    """Return the words for a title: the GPU, or the processor and its threads."""
    return str(machine.get("gpu") or f"{machine['processor']}, {machine['threads']} threads")


def _driver() -> str | None:
    if DRIVER.exists():
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", DRIVER.read_text())
        if found:
            return found.group()
    program = which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run(  # noqa: S603 - found on the path by its own name
        [program, "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
