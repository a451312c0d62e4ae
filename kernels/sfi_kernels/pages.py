"""Read rows of the paged KV cache, whatever the strides of its pages.

Our own pages are contiguous. vLLM keeps the keys and values of a token side by side, [P, H, N, K|V], and on
some processors a page's keys transposed, [P, H, D, N].
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sfi_kernels.launch import KernelLimitError
from sfi_kernels.op import check_int32, check_shapes

Steps = tuple[int, int, int]  # rows from a page, a head and a token to the next
MAX_WIDTH = 256  # numbers of a row that the copying kernels take
WIDE = 1 << 18  # numbers turned into float32 at once: 1 MiB, which stays in a processor's own cache


class HeadPages(NamedTuple):
    """Pages of all tokens on the device, of R KV heads; `place_H`, int32, are these heads' places, -1 for others."""

    place_H: torch.Tensor
    key_PRND: torch.Tensor
    value_PRNE: torch.Tensor


class Ring(NamedTuple):
    """Pages on the device with the recent tokens, of a cache whose pages of all tokens are in host memory.

    All pages are contiguous and of one size. `block_table_BP` has a column for every page of a request; pages that have
    left the ring share their numbers with those that took their place. `heads` are pages of some heads besides, which
    have the numbers of those in host memory.
    """

    key_PHND: torch.Tensor
    value_PHNE: torch.Tensor
    block_table_BP: torch.Tensor
    heads: HeadPages | None = None


def ring_operands(
    ring: Ring | None, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, table_BP: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return a kernel's tensors of a ring, pages of all tokens where it has none, and its constants RING and HOMES."""
    ring_tensors, heads = (key_PHND, value_PHNE, table_BP) if ring is None else ring[:3], ring and ring.heads
    constants = {"RING": ring is not None, "HOMES": 0 if heads is None else heads.key_PRND.shape[1]}
    return (*ring_tensors, *((table_BP, key_PHND, value_PHNE) if heads is None else heads)), constants


def check_ring(ring: Ring, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor) -> None:
    """Raise `ValueError` unless a ring fits the pages of all tokens and their table."""
    names = "key PHND, value PHNE, ring_key RHND, ring_value RHNE, block_table BX, ring_table BX"
    check_shapes(names, key_PHND, value_PHNE, ring.key_PHND, ring.value_PHNE, block_table_BP, ring.block_table_BP)
    check_int32(block_table_BP.device, ring_table=ring.block_table_BP)
    if ring.heads is not None:
        names = "key PHND, value PHNE, place H, heads_key PRND, heads_value PRNE"
        check_shapes(names, key_PHND, value_PHNE, *ring.heads)
    for name, pages, own in (("key", key_PHND, ring.key_PHND), ("value", value_PHNE, ring.value_PHNE)):
        rule, have = (pages.dtype, pages.stride(), block_table_BP.device), (own.dtype, own.stride(), own.device)
        if rule != have:
            raise ValueError(f"ring_{name} must have dtype, strides and device {rule}, got {have}")


def read_pages(pages_PHN: torch.Tensor, block_table_P: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return positions `start` to `stop` - 1 of a request, [1, H, T] or, of pages [P, H, N, D], [1, H, T, D].

    A view where one page holds all positions, as on a CPU with one page a request; a copy otherwise.
    """
    page_size = pages_PHN.shape[2]
    first, last = start // page_size, max(start, stop - 1) // page_size
    if first == last:
        page = pages_PHN.narrow(0, int(block_table_P[first]), 1)
        return page[:, :, start - first * page_size : stop - first * page_size]
    # straight to their place, neighbors at once: an index takes three times as long where keys lie transposed
    numbers, place = block_table_P[first : last + 1].tolist(), 0
    joined = pages_PHN.new_empty(pages_PHN.shape[1], len(numbers), *pages_PHN.shape[2:])
    while place < len(numbers):
        end = place + 1
        while end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            end += 1
        joined[:, place:end] = pages_PHN.narrow(0, numbers[place], end - place).transpose(0, 1)
        place = end
    return joined.flatten(1, 2)[None, :, start - first * page_size : stop - first * page_size]


def wide_chunks(
    pages_PHND: torch.Tensor, block_table_P: torch.Tensor, length: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Read a request's first `length` positions in float32, chunk by chunk: each as a slice, and its rows, [H, n, D].

    A chunk lies in one page, and is a view of it where pages are float32. A request without positions has an empty one.
    """
    _, H, N, D = pages_PHND.shape
    most = N if pages_PHND.dtype == torch.float32 else max(1, WIDE // (H * D))
    pages, start = block_table_P[: max(0, length - 1) // N + 1].tolist(), 0
    while start < max(1, length):
        slot, offset = divmod(start, N)
        count = min(length - start, most, N - offset)
        yield slice(start, start + count), pages_PHND[pages[slot], :, offset : offset + count].float()
        start += max(1, count)


def flat_rows(pages_PHND: torch.Tensor) -> tuple[torch.Tensor, Steps]:
    """Return pages as rows [X, D] at one distance, and the steps between pages, heads and tokens in rows.

    The view is for reading rows by `row_numbers`. Of pages that are not contiguous, rows may overlap.
    """
    P, H, N, D = pages_PHND.shape
    page, head, token, column = pages_PHND.stride()
    unit = math.gcd(page, head, token) or 1
    steps = page // unit, head // unit, token // unit
    last = (P - 1) * steps[0] + (H - 1) * steps[1] + (N - 1) * steps[2]
    return pages_PHND.detach().as_strided((last + 1, D), (unit, column)), steps


def row_numbers(position_RHS: torch.Tensor, table_RP: torch.Tensor, N: int, steps: Steps) -> torch.Tensor:
    """Return the rows of `flat_rows`, whose `steps` these are, that hold R requests' positions, [R, H * S].

    A negative position counts as 0; `N` are the tokens of a page.
    """
    R, H, S = position_RHS.shape
    token = position_RHS.clamp_min(0).long()
    page = table_RP.long().gather(1, (token // N).view(R, H * S)).view(R, H, S)
    head = torch.arange(H, device=position_RHS.device)[:, None]
    row_RHS = (token % N).mul_(steps[2]).add_(page, alpha=steps[0]).add_(head, alpha=steps[1])
    return row_RHS.flatten(1)


def row_constants(key_PHND: torch.Tensor, value_PHNE: torch.Tensor) -> dict[str, Any]:
    """Return the constants of a kernel that copies rows: strides, widths and padded widths of pages.

    Raise `KernelLimitError` for rows that are too wide, or whose numbers are not adjacent.
    """
    D, E = key_PHND.shape[3], value_PHNE.shape[3]
    if max(D, E) > MAX_WIDTH:
        raise KernelLimitError(
            f"key and value must be at most {MAX_WIDTH} wide for the kernel, got {D} and {E}; use the torch backend"
        )
    return {
        "KEY_STRIDES": kernel_strides(key_PHND, "key_pages"),
        "VALUE_STRIDES": kernel_strides(value_PHNE, "value_pages"),
        "D": D, "E": E, "BLOCK_D": 1 << (D - 1).bit_length(), "BLOCK_E": 1 << (E - 1).bit_length(),
    }  # fmt: skip


def kernel_strides(pages_PHND: torch.Tensor, name: str) -> Steps:
    """Return the strides of pages, heads and tokens; raise `KernelLimitError` unless the last stride is 1."""
    page, head, token, column = pages_PHND.stride()
    if column != 1:
        raise KernelLimitError(
            f"{name} must have a last stride of 1 for the Triton kernels, got {column}; use the torch backend"
        )
    return page, head, token
