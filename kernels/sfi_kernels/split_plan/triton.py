"""The split plan in Triton: one program, so that the host does not wait for the lengths."""

import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.launch import launch
from sfi_kernels.split_plan import reference as numbers
from sfi_kernels.step_descriptor import StepDescriptor

WORDS = tl.constexpr(words.WORDS)
UNIT = tl.constexpr(words.UNIT)
MODE, LENGTH, START = (tl.constexpr(w) for w in (words.MODE, words.LENGTH, words.START))
PACKED, FIRST, SPLITS = (tl.constexpr(w) for w in (words.PACKED, words.FIRST, words.SPLITS))
IDLE, FAST, SLOW = (tl.constexpr(mode) for mode in (words.IDLE, words.FAST, words.SLOW))
MIN_UNITS, MAX_SPLITS = tl.constexpr(numbers.MIN_UNITS), tl.constexpr(numbers.MAX_SPLITS)
OVERHEAD, CANDIDATES = tl.constexpr(numbers.OVERHEAD), tl.constexpr(numbers.CANDIDATES)


@triton.jit(do_not_specialize=["B", "items", "heads", "programs"])
def _split_plan_kernel(table_ptr, work_ptr, B, items, heads, programs, BLOCK_B: tl.constexpr, BLOCK_X: tl.constexpr):
    request = tl.arange(0, BLOCK_B)
    exists = request < B
    row = table_ptr + request * WORDS
    mode = tl.load(row + MODE, mask=exists, other=IDLE)
    length = tl.load(row + LENGTH, mask=exists, other=0)
    start = tl.load(row + START, mask=exists, other=0)
    packed = tl.load(row + PACKED, mask=exists, other=0)
    units = tl.cdiv(packed, UNIT) + tl.cdiv(length, UNIT) - start // UNIT
    units = tl.where(mode < FAST, 0, units)

    total = tl.sum(units)
    least = tl.maximum(MIN_UNITS, tl.cdiv(11 * heads * total, 10 * programs))
    least = tl.maximum(least, tl.cdiv(tl.max(units), MAX_SPLITS))
    size, cheapest = least, 2147483647
    for extra in tl.static_range(CANDIDATES):
        candidate = least + least * extra // CANDIDATES
        splits = tl.cdiv(units, candidate)
        waves = tl.cdiv(tl.sum(splits) * heads, programs)
        cost = waves * (candidate + OVERHEAD)
        size = tl.where(cost < cheapest, candidate, size)
        cheapest = tl.minimum(cost, cheapest)

    splits = tl.cdiv(units, size)
    slow = tl.where(mode == SLOW, splits, 0)
    fast = splits - slow
    first = tl.where(mode == SLOW, tl.cumsum(slow) - slow, tl.sum(slow) + tl.cumsum(fast) - fast)
    tl.store(row + FIRST, first, mask=exists)
    tl.store(row + SPLITS, splits, mask=exists)

    share = tl.cdiv(units, tl.maximum(splits, 1))
    for split in range(tl.max(splits)):
        item = work_ptr + (first + split) * 4
        own = exists & (split < splits)
        tl.store(item, request, mask=own)
        tl.store(item + 1, split * share, mask=own)
        tl.store(item + 2, tl.minimum(share, units - split * share), mask=own)
        tl.store(item + 3, 0, mask=own)
    used = tl.sum(splits)
    for begin in range(0, items, BLOCK_X):
        spare = begin + tl.arange(0, BLOCK_X)
        own = (spare >= used) & (spare < items)
        tl.store(work_ptr + spare * 4, -1, mask=own)
        for word in tl.static_range(1, 4):
            tl.store(work_ptr + spare * 4 + word, 0, mask=own)


def split_plan(descriptor: StepDescriptor, heads: int, programs: int) -> None:
    """See `reference.split_plan`."""
    numbers.check(descriptor, heads, programs)
    B, items = descriptor.batch, descriptor.work_XI.shape[0]
    launch(
        _split_plan_kernel, (1,), descriptor.table_BX, descriptor.work_XI, B, items, heads, programs,
        BLOCK_B=triton.next_power_of_2(B), BLOCK_X=128,
    )  # fmt: skip
