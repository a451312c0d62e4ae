"""Work that several processes share: each takes every n-th item, and makes the rows that are missing."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.study.records import Key, Records
from sfi_core.errors import SfiError

Item = TypeVar("Item")
# errors of one row, after which the other rows go on; a policy on sizes that it cannot take is RuntimeError
FAILURES = (SfiError, RuntimeError, MemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True, slots=True)
class Process:
    """Which items a process takes.

    Attributes:
        index: From 0.
        count: How many processes share the work.
    """

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Process":
        """Read `INDEX/COUNT`, such as 0/2; for argparse."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
            raise argparse.ArgumentTypeError(f"process must be INDEX/COUNT, got {text}")
        return cls(int(index), int(count))


def work(
    records: Records,
    items: Sequence[Item],
    keys: Callable[[Item], Sequence[Key]],
    make: Callable[[Item, set[Key]], Iterator[dict[str, Any]]],
    process: Process,
) -> int:
    """Make the rows of this process's items that no process has written; return how many.

    Args:
        records: Where rows are, and go to.
        items: All items, in the order of work; item i is of process i mod count.
        keys: The keys of an item's rows.
        make: Makes the rows of an item whose keys are given.
        process: Which items are this process's.
    """
    own = items[process.index :: process.count]
    done = records.done()
    left = sum(key not in done for item in own for key in keys(item))
    began, made = time.monotonic(), 0
    print(f"{left} rows to make of {len(own)} of {len(items)} items", flush=True)
    for item in own:
        pending = set(keys(item)) - records.done()  # another process may have made some by now
        here = 0
        for row in make(item, pending) if pending else ():
            records.add(row)
            here += 1
        if here:
            made, left = made + here, left - here
            seconds = time.monotonic() - began
            print(
                f"{time.strftime('%H:%M')} {item}: {here} rows; {made} made in {seconds:.0f} s, "
                f"{left} left, about {left * seconds / made / 60:.0f} min",
                flush=True,
            )
    return made
