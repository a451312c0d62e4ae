"""What the parts of an evaluation have in common: tasks, windows of a text, tasks of the harness."""

from collections.abc import Container, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch

from sfi_core.errors import MemoryForecastError, NumericsError
from sfi_core.measure.evaluation.claims import Claims

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
        """The keys of all rows, in the order in which one process makes them."""

    def key(self, row: Mapping[str, Any]) -> Key:
        """Return a row's key."""

    def weight(self, key: Key) -> int:
        """Return what a row's time grows with."""

    def check(self, model: Any, tokenizer: Any) -> None:
        """Refuse, before anything runs, what cannot run."""

    def run(
        self, model: Any, tokenizer: Any, done: Container[Key], *, claims: Claims, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Make the rows that are not done and that `claims` gives to this process."""
