"""The split plan in PyTorch (after FlashAttention-3's and FlashInfer's schedulers)."""

import torch

from sfi_kernels import step_descriptor as step
from sfi_kernels.step_descriptor import StepDescriptor

MIN_UNITS, MAX_SPLITS = 2, 64
# In units: what a wave costs beyond its own. Reckoned, not measured: a unit of bfloat16 keys and values,
# of 128 numbers each, is 32 KB, 2 us at a program's share of 4.3 TB/s, two programs on each of 132
# processors. A wave takes about 4 us more, for its last stores and for the work item, the request's
# words, the page numbers and the first tile, which wait for each other. Joining costs nothing that
# decides: a program loads all parts of a query head at once, half a KB a split, 1/64 of a unit.
OVERHEAD = 2
CANDIDATES = 8  # sizes of work items that are tried


def work_items(batch: int, heads: int, programs: int) -> int:
    """Return the most work items a plan can have, however long the requests are."""
    return batch + -(-programs // heads)


def split_plan(descriptor: StepDescriptor, heads: int, programs: int) -> None:
    """Split every request's units into work items of about one size, in place.

    Slow requests come first, so that long work does not start last. Among a few sizes from the least that
    fills the processors, the one with the lowest cost in waves of work wins. Each of the KV `heads` runs
    every work item; `programs` run at once on the device. The work list and the words FIRST and SPLITS are
    written. Raise `ValueError` for a descriptor with less room than `work_items` asks for.
    """
    check(descriptor, heads, programs)
    table, work = descriptor.table_BX, descriptor.work_XI
    words = table.long()
    units = _units(words)
    total, most = int(units.sum()), int(units.max())
    least = max(MIN_UNITS, -(-11 * heads * total // (10 * programs)), -(-most // MAX_SPLITS))
    costs = []
    for extra in range(CANDIDATES):
        size = least + least * extra // CANDIDATES
        splits = (units + size - 1) // size
        waves = -(-int(splits.sum()) * heads // programs)
        costs.append((waves * (size + OVERHEAD), size))
    size = min(costs)[1]
    splits = (units + size - 1) // size
    slow = words[:, step.MODE] == step.SLOW
    first = torch.where(
        slow, (splits * slow).cumsum(0) - splits, (splits * slow).sum() + (splits * ~slow).cumsum(0) - splits
    )
    table[:, step.FIRST], table[:, step.SPLITS] = first.int(), splits.int()
    work[:] = torch.tensor([-1, 0, 0, 0], dtype=torch.int32, device=work.device)
    for row in range(descriptor.batch):
        share = -(-int(units[row]) // max(1, int(splits[row])))
        for split in range(int(splits[row])):
            begin = split * share
            item = [row, begin, min(share, int(units[row]) - begin), 0]
            work[int(first[row]) + split] = torch.tensor(item, dtype=torch.int32)


def check(descriptor: StepDescriptor, heads: int, programs: int) -> None:
    """Raise `ValueError` if a plan could overflow the descriptor."""
    have, need = descriptor.work_XI.shape[0], work_items(descriptor.batch, heads, programs)
    if have < need:
        raise ValueError(f"descriptor must have room for {need} work items, got {have}")


def _units(words: torch.Tensor) -> torch.Tensor:
    packed = (words[:, step.PACKED] + step.UNIT - 1) // step.UNIT
    pages = (words[:, step.LENGTH] + step.UNIT - 1) // step.UNIT - words[:, step.START] // step.UNIT
    return torch.where(words[:, step.MODE] < step.FAST, 0, packed + pages)
