"""The tiles that a program of the attention kernels reads at once, and the split kernel's launches.

With one query a request, a pass is one launch: `EACH`. Otherwise it is two, since one query has too few rows
for a large tile: `LAST` for requests with one query, the last of W; `SEVERAL` for requests that verify a
draft. A program whose request belongs to the other launch returns at once.
"""

from importlib.util import find_spec
from typing import NamedTuple

import torch

from sfi_kernels.launch import KernelLimitError, Target, check_device

WIDEST = 256  # numbers of a head
STAGE_BYTES = 32768  # of a tile: four in flight on each processor cover its memory's latency
SMALLEST = 16  # tensor cores take no fewer rows
# compute capabilities times ten that fit two programs of four stages, and that fit little
LARGE_SHARED, SMALL_SHARED = (90, 100, 103), (86, 89, 120, 121)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# of a thread, without spills; left alone, the compiler spills for more programs. Two split programs of 128 threads fit
# a processor with either. Half precision leaves enough beside them for a program of the Selector, of top-k or of pack.
REGISTERS, HALF_REGISTERS = 255, 208
FLOAT32_NUMBERS = 4096  # of a tile of queries in float32, whose products run in registers
EACH, LAST, SEVERAL = range(3)
HOPPER = 90  # compute capability times ten
FEW, MANY, MOST = 32, 64, 128  # rows of a tile
NARROW, WIDE = 64, 128  # padded width of a head


class TileShape(NamedTuple):
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
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
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
    key_width, value_width, tokens = padded(D), padded(E), 64
    # float32 products run in registers, which a tile of half the bytes does not overflow
    most = STAGE_BYTES // (2 if key.dtype == torch.float32 else 1)
    while tokens > SMALLEST and (page_size % tokens or tokens * (key_width + value_width) * key.itemsize > most):
        tokens //= 2
    return TileShape(tokens, key_width, value_width, stages=4 if target.capability in LARGE_SHARED else 3)


def padded(size: int) -> int:
    """Round up to a power of two that tensor cores take."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


class QueryTile(NamedTuple):
    """What a program of an attention kernel holds and reads at once; the keys of a tile, `tokens`, lie in one page.

    `rows` are queries times query heads, 16 to 128; each of the `warps` takes 16 rows or columns of its own.
    """

    rows: int
    warps: int
    tokens: int
    stages: int
    registers: int = REGISTERS


def parts_of_pass(
    group: int, queries: int, tile: TileShape, target: Target, *, full: bool
) -> list[tuple[int, QueryTile, int]]:
    """Choose the split kernel's launches in a pass with W = `queries`; `full` are numbers of 32 bits.

    Of each launch: EACH, LAST or SEVERAL, its tile, which pages allow, and how many of these a request's queries need.
    """
    # float32 products run in registers, which need more threads
    registers, warps = (REGISTERS, 8) if full else (HALF_REGISTERS, 4)
    single = QueryTile(padded(group), warps, tile.tokens, tile.stages, registers)
    if queries == 1:
        return [(EACH, single, 1)]
    several = several_queries_tile(group * queries, tile, target, full=full)
    return [(LAST, single, 1), (SEVERAL, several, -(-group * queries // several.rows))]


def several_queries_tile(queries: int, tile: TileShape, target: Target, *, full: bool) -> QueryTile:
    """Choose the tile for requests that verify a draft; `queries` counts each query head.

    Half the keys in a tile free registers for twice the queries; one more stage keeps as many bytes in flight.
    """
    if full:
        rows = min(padded(queries), FEW, FLOAT32_NUMBERS // tile.key_width)
        return QueryTile(rows, 8, tile.tokens, tile.stages)
    width, large = max(tile.key_width, tile.value_width), target.capability in LARGE_SHARED
    most = MOST if width <= (WIDE if large else NARROW) else MANY
    if tile.key_width > tile.value_width:  # keys of MLA, 192 numbers in 256, spill with more rows
        most = SMALLEST
    rows = min(padded(queries), most)
    warps = 8 if rows == MOST or (width > WIDE and rows >= FEW) else 4
    # Hopper's tensor cores read queries from shared memory, the others' from registers
    whole = rows <= FEW or (rows == MOST and target.capability == HOPPER)
    tokens = tile.tokens if whole else min(FEW, tile.tokens)
    deeper = tokens < tile.tokens and (rows == MANY or large)
    return QueryTile(rows, warps, tokens, tile.stages + deeper)


def prompt_tile(query_BHGWD: torch.Tensor, tile: TileShape, target: Target, *, window: bool = False) -> QueryTile:
    """Choose the tile for a piece of a prompt, or for the logits of a window's queries."""
    _, _, G, W, D = query_BHGWD.shape
    # page numbers are fetched ahead of the keys: 5 stages hold three tiles of keys, 3 hold two, of which the
    # one in use is in registers on sm_80
    width, stages = max(tile.key_width, tile.value_width), 3 if target.capability in SMALL_SHARED else 5
    if query_BHGWD.dtype == torch.float32:
        most = min(32, FLOAT32_NUMBERS // padded(D))
        return QueryTile(min(most, padded(G * W)), 8, tile.tokens, stages)
    if window or width <= NARROW:
        most, tokens = 64, tile.tokens
    elif target.capability in LARGE_SHARED:  # the tensor cores read queries from shared memory
        most, tokens = 128, tile.tokens
    else:  # registers hold them
        most, tokens = 32 if width == WIDEST else 128, min(32, tile.tokens)
    rows = min(most, padded(G * W))
    return QueryTile(rows, 8 if rows == 128 else 4, tokens, stages)  # noqa: PLR2004
