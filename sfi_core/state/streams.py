"""CUDA streams that successive runs share."""

import threading

import torch

_made = threading.local()


def stream_of(device: torch.device, role: str, priority: int = 0) -> torch.cuda.Stream:
    """Return the stream of a role on a CUDA device, one per thread; a lower `priority` goes first.

    Runs share it because PyTorch's allocator reuses freed memory only on the same stream, and cuBLAS keeps a
    workspace for each stream: new streams in every run would take new memory.
    """
    streams: dict[tuple[str, str], torch.cuda.Stream] = _made.__dict__.setdefault("streams", {})
    key = (str(device), role)
    if key not in streams:
        streams[key] = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    return streams[key]
