"""The protocol of the two parts of an evaluation: samples of tasks, windows of a text."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch

from sfi_core.errors import MemoryForecastError, NumericsError

Key = tuple[Any, ...]
# errors that fail the rows of one method and do not stop the evaluation
FAILURES = (MemoryForecastError, NumericsError, torch.OutOfMemoryError, MemoryError)


class Grid(Protocol):
    """Makes the rows of the table named `table`; each row has a key."""

    table: ClassVar[str]

    @property
    def keys(self) -> list[Key]:
        """The keys of all rows, in order."""

    def key(self, row: Mapping[str, Any]) -> Key:
        """Return a row's key."""

    def weight(self, key: Key) -> int:
        """Return a number that a row's time grows with, such as its context's length."""

    def check(self, model: Any, tokenizer: Any) -> None:
        """Refuse, before anything runs, methods and tasks that cannot run."""

    def run(
        self, model: Any, tokenizer: Any, done: Container[Key], **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Make the rows that are not done."""


def grouped(units: Iterable[int], alike: Callable[[int], Any]) -> list[list[int]]:
    """Group units of equal `alike(unit)`, which need not be hashable; in the order of their first units."""
    found: list[tuple[Any, list[int]]] = []
    for unit in units:
        key = alike(unit)
        own = next((group for other, group in found if other == key), None)
        if own is None:
            found.append((key, [unit]))
        else:
            own.append(unit)
    return [group for _, group in found]
