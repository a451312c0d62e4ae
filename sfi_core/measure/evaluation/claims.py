"""Which samples are this process's, where several processes share an evaluation."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Claims(Protocol):
    """Gives each unit of an evaluation, such as a sample with all its rows, to one process at a time."""

    def take(self, unit: int) -> bool:
        """Take a unit, and learn which rows others have made; False where another process has the unit."""

    def give_back(self, unit: int) -> None:
        """Leave a unit to others."""


class Alone:
    """The claims of a process that shares nothing: every unit is its own."""

    def take(self, unit: int) -> bool:
        """Take a unit; no other process can have it."""
        return True

    def give_back(self, unit: int) -> None:
        """Do nothing: nobody waits for the unit."""


ALONE = Alone()


def grouped(units: Iterable[int], alike: Callable[[int], Any]) -> list[list[int]]:
    """Put units together for which `alike` gives the same, in the order of each group's first one."""
    found: list[tuple[Any, list[int]]] = []
    for unit in units:
        key = alike(unit)
        own = next((group for other, group in found if other == key), None)
        if own is None:
            found.append((key, [unit]))
        else:
            own.append(unit)
    return [group for _, group in found]


@contextmanager
def taken(claims: Claims, units: Iterable[int], left: Callable[[int], bool]) -> Iterator[list[int]]:
    """Take units until the body ends.

    Args:
        claims: Knows what other processes have.
        units: The units wanted.
        left: Whether a unit has rows that are not there; asked again once the unit is taken.

    Yields:
        The units with rows left that no other process has.
    """
    mine = []
    try:
        for unit in units:
            if left(unit) and claims.take(unit):
                mine.append(unit)  # noqa: PERF401 - what was taken is given back, whatever comes
        yield [unit for unit in mine if left(unit)]
    finally:
        for unit in mine:
            claims.give_back(unit)
