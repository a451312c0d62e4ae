"""The protocol of the two parts of an evaluation: samples of tasks, windows of a text."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from sfi_core.errors import MemoryForecastError, NumericsError
from sfi_core.measure.evaluation.method import MethodVariant
from sfi_core.models.load import first_line

T = TypeVar("T")
Key = tuple[Any, ...]
Row = dict[str, Any]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Together(Generic[T]):
    """Makes the rows of units that are read once and decoded together under each method.

    Methods that fail, and those in `alone`, get the units one by one.

    Attributes:
        read: Reads units for some methods.
        decode: Returns the rows of a method, given what `read` returned; both may raise one of `FAILURES`.
        empty: Makes a row without results.
        alone: Labels of methods that decode one unit at a time.
    """

    read: Callable[[Sequence[T], Sequence[MethodVariant]], Any]
    decode: Callable[[Any, MethodVariant, Sequence[T]], list[Row]]
    empty: Callable[[MethodVariant, T], Row]
    alone: Container[str] = ()

    def rows(self, units: Sequence[T], pending: Sequence[MethodVariant]) -> Iterator[Row]:
        """Yield the rows; a unit under a method that fails has an `error`."""
        try:
            shared = self.read(units, pending)
        except FAILURES as error:
            shared, problem = None, first_line(error)
        failed = []
        for one in pending:
            if len(units) > 1 and (shared is None or one.method.label in self.alone):
                failed.append(one)
                continue
            if shared is not None:
                try:
                    yield from self.decode(shared, one, units)
                    continue
                except FAILURES as error:
                    problem = first_line(error)
            if len(units) > 1:
                failed.append(one)
            else:
                yield self.empty(one, units[0]) | {"error": problem}
        del shared  # frees memory for the next units
        for unit in units if failed else ():
            yield from self.rows([unit], failed)
