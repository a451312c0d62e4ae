"""CUDA streams that runs share, one after the other."""

import threading

import torch

_made = threading.local()


def stream_of(device: torch.device, role: str, priority: int = 0) -> torch.cuda.Stream:
    """Return the stream of a role on a device: made once in each thread, and used by every run of it.

    PyTorch's allocator gives a stream's freed memory to that stream alone, and cuBLAS keeps a workspace for
    each stream. So a stream of its own for every run would take both anew in each run.

    Args:
        device: A CUDA device.
        role: What the stream is for; two roles never share a stream.
        priority: Of its kernels; a lower number goes first.
    """
    streams: dict[tuple[str, str], torch.cuda.Stream] = _made.__dict__.setdefault("streams", {})
    key = (str(device), role)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return streams[key]
