"""The machine in plain values, for the doctor and for results."""

import platform
import re
from pathlib import Path
from typing import Any

import torch

from sfi_core.machine.memory import free_bytes, total_bytes
from sfi_core.machine.versions import versions

CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")


def describe() -> dict[str, Any]:
    """Describe the machine: processor, cores, memory, GPUs."""
    cpu = torch.device("cpu")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_bytes(cpu),
        "free_memory_bytes": free_bytes(cpu),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],
        "cuda": torch.version.cuda,
    }


def describe_measured(device: torch.device | None = None) -> dict[str, Any]:
    """Describe the machine, the measured device, and the software that drives the device."""
    machine = {
        **describe(),
        "device": None if device is None else str(device),
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": versions()["triton"],
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
    """Return a machine's name for a figure's title: the GPU, or the processor and its threads."""
    return str(machine.get("gpu") or f"{machine['processor']}, {machine['threads']} threads")


def _processor() -> str:
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    text = DRIVER.read_text() if DRIVER.exists() else ""
    version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return version.group() if version else None
