"""The grid of an evaluation: a cell for every method on every sample of a task, or window of a text, and its row."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

import torch

from sfi_core.errors import InputError, MemoryForecastError, NumericsError
from sfi_core.machine.text import first_line
from sfi_core.measure.evaluation.method import Method
from sfi_core.models.rotation import most_positions
from sfi_core.settings.engine import DEFAULTS, EngineOptions

TASKS, TEXT = "samples", "fidelity"  # the tables of rows
# errors that fail the rows of one method and do not stop the evaluation
FAILURES = (MemoryForecastError, NumericsError, torch.OutOfMemoryError, MemoryError)

T = TypeVar("T")
Key = tuple[Any, ...]
Row = dict[str, Any]
Place = tuple[int, int, str | None]  # number, length and task of a cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row to make: a method on a sample of a task, or on a window of a text."""

    method: Method
    length: int  # tokens of the prompt
    number: int  # the sample's seed, or the window's number
    task: str | None = None  # the task's name; None for a window

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
    """Makes the rows of cells; a prompt, of type T, is read once and decoded under each method."""

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
    def read(self, prompt: T, methods: Sequence[Method]) -> Any:
        """Read a prompt for some methods; may raise one of `FAILURES`, as `decode`."""

    @abstractmethod
    def decode(self, shared: Any, method: Method, prompt: T) -> Row:
        """Return the row of a method, given what `read` returned."""

    @abstractmethod
    def empty(self, method: Method, prompt: T) -> Row:
        """Return a row without results."""

    def make(self, cells: Sequence[Cell]) -> Iterator[Row]:
        """Decode cells, and yield their rows of plain values; `check` the cells first.

        The cells of a prompt follow each other. The row of a method that ran out of memory or gave broken logits has
        an `error` and no result.
        """
        for place, group in groupby(cells, lambda cell: cell.place):
            methods, prompt = [cell.method for cell in group], self.draw(place)
            try:
                shared, problem = self.read(prompt, methods), ""
            except FAILURES as error:
                shared, problem = None, first_line(error)
            for method in methods:
                row = self.empty(method, prompt) | {"error": problem}
                try:
                    row = row if shared is None else self.decode(shared, method, prompt)
                except FAILURES as error:
                    row["error"] = first_line(error)
                yield row
            del shared  # frees memory for the next prompt

    def positions(self, cells: Sequence[Cell]) -> int | None:
        """Return the model's positions, None if unknown; raise `InputError` if a length exceeds them."""
        limit, longest = most_positions(self.model.config), max(cell.length for cell in cells)
        if limit is not None and longest > limit:
            raise InputError(f"length must be at most the model's {limit} positions, got {longest}")
        return limit
