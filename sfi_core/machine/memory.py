"""Free memory of this machine, and the process's peak."""

import resource
import sys
from pathlib import Path

import torch

STATUS, CLEAR_REFS, MEMINFO = (Path("/proc") / name for name in ("self/status", "self/clear_refs", "meminfo"))


def free_bytes(device: torch.device) -> int | None:
    """Return a device's free memory, including what PyTorch's allocator keeps unused; None for unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return _field(MEMINFO, "MemAvailable:")


def give_back(device: torch.device) -> None:
    """Return what PyTorch's allocator keeps unused to the device.

    Memory that an earlier run left on other streams or in its graphs' pool cannot be reused otherwise.
    """
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
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None


def _max_rss() -> int:
    # in bytes on macOS, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
