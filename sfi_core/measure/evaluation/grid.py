"""What the two parts of an evaluation share: samples of tasks, windows of a text."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from sfi_core.errors import ConfigError, InputError, MemoryForecastError, NumericsError
from sfi_core.machine.text import first_line
from sfi_core.measure.evaluation.method import Method, MethodVariant, Size
from sfi_core.models.rotation import most_positions
from sfi_core.settings.engine import DEFAULTS, EngineOptions

T = TypeVar("T")
Key = tuple[Any, ...]
Row = dict[str, Any]
Left = Callable[[int], list[MethodVariant]]
# errors that fail the rows of one method and do not stop the evaluation
FAILURES = (MemoryForecastError, NumericsError, torch.OutOfMemoryError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(ABC):
    """The rows of an evaluation: every method at every size, at every place; a row's key says which.

    Attributes:
        lengths: Tokens of the prompts.
        table: The table of the rows.
        place: The columns of a place, the last but one is the length.
    """

    methods: tuple[Method, ...]
    sizes: tuple[Size, ...]
    lengths: tuple[int, ...]
    table: ClassVar[str]
    place: ClassVar[tuple[str, ...]]

    @abstractmethod
    def places(self) -> list[Key]:
        """List the places, in order."""

    @abstractmethod
    def check(self, model: Any, tokenizer: Any) -> None:
        """Refuse, before anything runs, methods, lengths and tasks that cannot run."""

    def run(
        self,
        model: Any,
        tokenizer: Any,
        done: Container[Key] = frozenset(),
        *,
        batch_size: int = 1,
        engine: EngineOptions = DEFAULTS,
    ) -> Iterator[Row]:
        """Decode under every method, and yield the rows of plain values that are not done.

        Args:
            model: A decoder-only model of transformers; `check` it first.
            tokenizer: The model's tokenizer.
            done: Keys of rows that are not made again.
            batch_size: The most units, samples or windows of one length, that are decoded together. A batch that
                fails is decoded again one by one.
            engine: How prompts are read and steps are run; a policy that cannot offload runs without the device
                budget.

        Yields:
            Rows; one of a method that ran out of memory or gave broken logits has an `error` and no result. On Ctrl-C
            the rows of the current batch are lost.
        """
        variants, places = self.resolved(tokenizer), self.places()

        def left(unit: int) -> list[MethodVariant]:
            return [one for one in variants if (*one.key, *places[unit]) not in done]

        yield from self.rows(model, tokenizer, engine, batch_size, left)

    @abstractmethod
    def rows(self, model: Any, tokenizer: Any, engine: EngineOptions, batch_size: int, left: Left) -> Iterator[Row]:
        """Make the rows of `run`; `left` returns the variants that a unit, a place by its number, is decoded under."""

    def resolved(self, tokenizer: Any) -> list[MethodVariant]:
        """Return the `variants` as they run with a tokenizer."""
        return self.variants

    @property
    def variants(self) -> list[MethodVariant]:
        """The methods at their sizes."""
        return [one for method in self.methods for one in method.variants(self.sizes)]

    @property
    def keys(self) -> list[Key]:
        """The keys of all rows, in order."""
        return [(*one.key, *place) for place in self.places() for one in self.variants]

    def key(self, row: Mapping[str, Any]) -> Key:
        """Return a row's key."""
        return tuple(row[name] for name in ("method", "size", *self.place))

    def weight(self, key: Key) -> int:
        """Return a number that a row's time grows with: its context's length."""
        return int(key[-2])

    def check_distinct(self, **more: Sequence[Any]) -> None:
        """Raise `ConfigError` if a list of values is empty or has a value twice."""
        named: dict[str, Sequence[Any]] = {
            "method": [method.label for method in self.methods],
            "size": [size.label for size in self.sizes],
            "length": self.lengths,
            **more,
        }
        for name, given in named.items():
            if not given:
                raise ConfigError(f"{name} must be given at least once, got none")
            if len(set(given)) < len(given):
                raise ConfigError(f"each {name} must differ, got {', '.join(map(str, given))}")

    def positions_of(self, model: Any) -> int | None:
        """Return the model's positions, None if unknown; raise `InputError` if a length exceeds them."""
        limit, longest = most_positions(model.config), max(self.lengths)
        if limit is not None and longest > limit:
            raise InputError(f"length must be at most the model's {limit} positions, got {longest}")
        return limit


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

    def run(self, batches: Iterable[Iterable[int]], draw: Callable[[int], T], left: Left) -> Iterator[Row]:
        """Yield the rows of batches of unit numbers; units of other methods `left` are decoded apart."""
        for batch in batches:
            for units in grouped(filter(left, batch), lambda unit: [one.key for one in left(unit)]):
                yield from self.rows(list(map(draw, units)), left(units[0]))
