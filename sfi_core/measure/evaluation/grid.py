"""The grid of an evaluation: a cell for every method on every sample of a task, or window of a text, and its row."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from sfi_core.errors import InputError, MemoryForecastError, NumericsError
from sfi_core.machine.text import first_line
from sfi_core.measure.evaluation.method import Method
from sfi_core.models.rotation import most_positions
from sfi_core.settings.engine import DEFAULTS, EngineOptions

POOL = 8  # batches of samples that are searched for prompts of equal budgets
TASKS, TEXT = "samples", "fidelity"  # the tables of rows
# errors that fail the rows of one method and do not stop the evaluation
FAILURES = (MemoryForecastError, NumericsError, torch.OutOfMemoryError, MemoryError)

T = TypeVar("T")
Key = tuple[Any, ...]
Row = dict[str, Any]
Place = tuple[int, int, str | None]  # number, length and task of a cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row to make: a method on a sample of a task, or on a window of a text.

    Attributes:
        task: The task's name; None for a window.
        length: Tokens of the prompt.
        number: The sample's seed, or the window's number.
    """

    method: Method
    length: int
    number: int
    task: str | None = None

    @property
    def table(self) -> str:
        """The table of the row."""
        return TEXT if self.task is None else TASKS

    @property
    def place(self) -> Place:
        """What the cells of all methods on the same prompt share."""
        return self.number, self.length, self.task

    @property
    def key(self) -> Key:
        """The values that identify the row; see `key_of`."""
        return (*self.method.key, self.task, self.length, self.number)


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the key of a row's cell."""
    number = row["seed"] if "seed" in row else row["window"]
    return row["method"], row["size"], row.get("task"), row["length"], number


class Rows(ABC, Generic[T]):
    """Makes the rows of cells whose prompts, of type T, are read once and decoded together under each method."""

    def __init__(self, model: Any, tokenizer: Any, engine: EngineOptions = DEFAULTS) -> None:
        """Take a decoder-only model of transformers; `engine` says how prompts are read and steps are run.

        A policy that cannot offload runs without the device budget.
        """
        self.model, self.tokenizer, self.engine = model, tokenizer, engine

    @abstractmethod
    def check(self, cells: Sequence[Cell]) -> None:
        """Refuse, before anything runs, methods, lengths and tasks that cannot run."""

    @abstractmethod
    def draw(self, place: Place) -> T:
        """Return the prompt of a place, with what its score needs."""

    @abstractmethod
    def read(self, prompts: Sequence[T], methods: Sequence[Method]) -> Any:
        """Read prompts for some methods; may raise one of `FAILURES`, as `decode`."""

    @abstractmethod
    def decode(self, shared: Any, method: Method, prompts: Sequence[T]) -> list[Row]:
        """Return the rows of a method, given what `read` returned."""

    @abstractmethod
    def empty(self, method: Method, prompt: T) -> Row:
        """Return a row without results."""

    def alike(self, prompt: T, methods: Sequence[Method]) -> Any:
        """Return a value that is equal for prompts of a task and length that may be decoded together."""

    def make(self, cells: Sequence[Cell], batch_size: int = 1) -> Iterator[Row]:
        """Decode cells, and yield their rows of plain values; `check` the cells first.

        Yields:
            Rows, by place; one of a method that ran out of memory or gave broken logits has an `error` and no result.
            At most `batch_size` prompts of a task and length are decoded together; a batch that fails is decoded again
            one by one. On Ctrl-C the rows of the current batch are lost.
        """
        pools: dict[Key, dict[Place, list[Method]]] = {}
        pool = 1 if batch_size == 1 else POOL * batch_size
        for cell in cells:
            places = pools.setdefault((cell.number // pool, cell.length, cell.task), {})
            places.setdefault(cell.place, []).append(cell.method)
        for places in pools.values():
            for prompts, methods in self._batches(places, batch_size):
                yield from self._together(prompts, methods)

    def _batches(self, places: Mapping[Place, list[Method]], size: int) -> Iterator[tuple[list[T], list[Method]]]:
        # prompts that are alike and have the same methods; the prompts of an only batch are not compared
        groups: list[tuple[Any, list[T], list[Method]]] = []
        for place, methods in places.items():
            prompt = self.draw(place)
            alike = [method.key for method in methods], len(places) > 1 and self.alike(prompt, methods)
            group = next((prompts for key, prompts, _ in groups if key == alike), None)
            if group is None:
                groups.append((alike, [prompt], methods))
            else:
                group.append(prompt)
        for _, prompts, methods in groups:
            for first in range(0, len(prompts), size):
                yield prompts[first : first + size], methods

    def _together(self, prompts: Sequence[T], methods: Sequence[Method]) -> Iterator[Row]:
        try:
            shared, problem = self.read(prompts, methods), ""
        except FAILURES as error:
            shared, problem = None, first_line(error)
        failed = []
        for method in methods:
            if shared is not None:
                try:
                    yield from self.decode(shared, method, prompts)
                    continue
                except FAILURES as error:
                    problem = first_line(error)
            if len(prompts) > 1:
                failed.append(method)
            else:
                yield self.empty(method, prompts[0]) | {"error": problem}
        del shared  # frees memory for the next prompts
        for prompt in prompts if failed else ():
            yield from self._together([prompt], failed)

    def positions(self, cells: Sequence[Cell]) -> int | None:
        """Return the model's positions, None if unknown; raise `InputError` if a length exceeds them."""
        limit, longest = most_positions(self.model.config), max(cell.length for cell in cells)
        if limit is not None and longest > limit:
            raise InputError(f"length must be at most the model's {limit} positions, got {longest}")
        return limit
