"""What the parts of an evaluation have in common: samples of tasks, windows of a text."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch

from sfi_core.errors import MemoryForecastError, NumericsError

Key = tuple[Any, ...]
# errors of one method, after which the other methods go on
FAILURES = (MemoryForecastError, NumericsError, torch.OutOfMemoryError, MemoryError)


class Grid(Protocol):
    """The rows of a part of an evaluation; each row has a key.

    Attributes:
        table: The table of the rows.
    """

    table: ClassVar[str]

    @property
    def keys(self) -> list[Key]:
        """The keys of all rows, in the order in which they come."""

    def key(self, row: Mapping[str, Any]) -> Key:
        """Return a row's key."""

    def weight(self, key: Key) -> int:
        """Return what a row's time grows with."""

    def check(self, model: Any, tokenizer: Any) -> None:
        """Refuse, before anything runs, what cannot run."""

    def run(
        self, model: Any, tokenizer: Any, done: Container[Key], **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Make the rows that are not done."""


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
