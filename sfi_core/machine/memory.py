"""This machine: its memory, the process's peak, and its description for the doctor and for results."""

import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from sfi_core.machine.versions import versions

STATUS, CLEAR_REFS, MEMINFO = (Path("/proc") / name for name in ("self/status", "self/clear_refs", "meminfo"))
CPUINFO = Path("/proc/cpuinfo")
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # version 2
DRIVER = Path("/proc/driver/nvidia/version")


def free_bytes(device: torch.device) -> int | None:
    """Return a device's free memory, including what PyTorch's allocator keeps unused; None for unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    left = [size for size in (_field(MEMINFO, "MemAvailable:"), _group_bytes()) if size is not None]
    return min(left, default=None)


def give_back(device: torch.device) -> None:
    """Return what PyTorch's allocator keeps unused, on other streams or in a graph's pool, to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def total_bytes(device: torch.device) -> int | None:
    """Return the memory of a device, free or not; None for unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return _field(MEMINFO, "MemTotal:")


def resident_bytes(device: torch.device) -> int:
    """Return the bytes in use: of the process on a CPU, of PyTorch's allocator on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _field(STATUS, "VmRSS:") or _max_rss()


def reset_peak(device: torch.device) -> None:
    """Start measuring the peak anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR_REFS.exists():
        try:
            CLEAR_REFS.write_text("5")  # resets VmHWM
        except OSError:
            return  # the peak is then the process's, not the run's


def peak_bytes(device: torch.device) -> int:
    """Return the peak since `reset_peak`."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _field(STATUS, "VmHWM:") or _max_rss()


def _field(path: Path, name: str) -> int | None:
    kib = _found(path, rf"^{name}\s*(\d+)")
    return None if kib is None else int(kib) * 1024


def _group_bytes() -> int | None:
    # what the limits of the process's control groups leave, but for files that the system would drop
    process_group, left = GROUPS / (_found(OWN_GROUP, r"^0::/(.*)$") or ""), []
    for group in (process_group, *process_group.parents):
        if limit := _found(group / "memory.max", r"^(\d+)$"):
            used = int(_found(group / "memory.current", r"(\d+)") or 0)
            left.append(int(limit) - used + int(_found(group / "memory.stat", r"^inactive_file (\d+)") or 0))
    return max(0, min(left)) if left else None


def _max_rss() -> int:
    # in bytes on macOS, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def describe() -> dict[str, Any]:
    """Describe the machine: processor, cores, memory, GPUs."""
    cpu, gpus = torch.device("cpu"), torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": (_found(CPUINFO, r"^model name\s*:(.*)") or platform.processor() or platform.machine()).strip(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_bytes(cpu),
        "free_memory_bytes": free_bytes(cpu),
        "gpus": [torch.cuda.get_device_name(i) for i in range(gpus)],
        "cuda": torch.version.cuda,
    }


def describe_measured(device: torch.device | None = None) -> dict[str, Any]:
    """Describe the machine, the measured device, and the software that drives the device."""
    machine = {
        **describe(),
        "device": None if device is None else str(device),
        "driver": _found(DRIVER, r"\b(\d{3}\.\d+(?:\.\d+)?)\b"),
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


def _found(path: Path, pattern: str) -> str | None:
    match = re.search(pattern, path.read_text(), re.MULTILINE) if path.exists() else None
    return match.group(1) if match else None
