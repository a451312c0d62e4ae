"""The tile of keys and values that a program of the attention kernels reads at once."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from sfi_kernels.launch import KernelLimitError, Target, check_device

WIDEST = 256  # numbers of a head
STAGE_BYTES = 32768  # of a tile: four in flight on each processor cover its memory's latency
SMALLEST = 16  # tensor cores take no fewer rows
# compute capabilities times ten that fit two programs of four stages, and that fit little
LARGE_SHARED, SMALL_SHARED = (90, 100, 103), (86, 89, 120, 121)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class TileShape:
    """A tile: keys of one page, padded widths of key and value, and tiles in the pipeline (`stages`)."""

    tokens: int
    key_width: int
    value_width: int
    stages: int


def check_limits(key_width: int, value_width: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `KernelLimitError` for a model that the attention kernels cannot run."""
    if find_spec("triton") is None:
        raise KernelLimitError("the Triton kernels need the triton package; use the torch backend")
    if dtype not in DTYPES:
        names = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        raise KernelLimitError(
            f"dtype must be one of {names} for the Triton kernels, got {dtype}; use the torch backend"
        )
    _check_tile(key_width, value_width, page_size)
    check_device(device, dtype)


def check_width(width: int) -> None:
    """Raise `KernelLimitError` for heads wider than the attention kernels take."""
    if width > WIDEST:
        raise KernelLimitError(
            f"head dimension must be at most {WIDEST} for the Triton kernels, got {width}; use the torch backend"
        )


def _check_tile(key_width: int, value_width: int, page_size: int) -> None:
    check_width(max(key_width, value_width))
    if page_size % SMALLEST:
        raise KernelLimitError(
            f"page size must be a multiple of {SMALLEST} for the Triton kernels, got {page_size}; use the torch backend"
        )


def tile_shape(key: torch.Tensor, value: torch.Tensor, page_size: int, target: Target) -> TileShape:
    """Choose the tile for pages of keys and values; raise `KernelLimitError` beyond `check_limits`."""
    D, E = key.shape[-1], value.shape[-1]
    _check_tile(D, E, page_size)
    key_width, value_width = padded(D), padded(E)
    tokens = 64
    # float32 products run in registers, which a tile of half the bytes does not overflow
    most = STAGE_BYTES // (2 if key.dtype == torch.float32 else 1)
    while tokens > SMALLEST and (page_size % tokens or tokens * (key_width + value_width) * key.itemsize > most):
        tokens //= 2
    return TileShape(tokens, key_width, value_width, stages=4 if target.capability in LARGE_SHARED else 3)


def padded(size: int) -> int:
    """Round up to a power of two that tensor cores take."""
    return max(SMALLEST, 1 << (size - 1).bit_length())
