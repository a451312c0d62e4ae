"""The grid of an evaluation: a cell for every method on every sample of a task, or window of a text, and its row."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch

from sfi_core.errors import ConfigError, InputError, MemoryForecastError, NumericsError
from sfi_core.machine.text import first_line
from sfi_core.models.rotation import most_positions
from sfi_core.policies import policy_class
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DEFAULTS, EngineOptions

WHOLE = "full-kv"  # full attention, to which sizes do not apply
FILE = ".toml"  # ending of a preset that is a file of settings
WRITTEN = re.compile(
    r"(?:(?P<label>[^=:]+)=)?(?P<policy>[^@:=]+)(?:@(?P<preset>[^:=]+))?(?::(?P<settings>.+))?", re.DOTALL
)
NEXT = re.compile(r",(?=\s*[\w.]+\s*=)")  # a comma before another setting
TASKS, TEXT = "samples", "fidelity"  # the tables of rows
# errors that fail the rows of one method and do not stop the evaluation
FAILURES = (MemoryForecastError, NumericsError, torch.OutOfMemoryError, MemoryError)

T = TypeVar("T")
Key = tuple[Any, ...]
Row = dict[str, Any]
Place = tuple[int, int, str]  # number, length and task of a cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A policy with its settings, at a size: how much a fast step may read."""

    label: str
    policy: str
    preset: str  # the preset that the settings start from
    settings: Mapping[str, Any]  # differences from the preset, as `SfiConfig.replace` takes them
    config: SfiConfig  # the preset with these settings, without the size
    # sink, selected and recent tokens over the tokens of the prompt, in (0, 1]; None for a size of its own
    share: float | None = None
    recent: int = 128  # with a share, the most tokens of the recent window

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `[LABEL=]POLICY[@PRESET][:key=value,...]`; values are JSON or bare words. The size is its own.

        A preset that ends in `.toml` is a file of settings, such as `sfi tune` writes, and keeps its sizes. Raise
        `ConfigError` for another form, policy, preset or setting, `InputError` for a file that cannot be read.
        """
        match = WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"method must be POLICY[@PRESET][:key=value,...], got {text!r}")
        policy, preset = match["policy"], match["preset"] or "default"
        try:
            policy_class(policy)
            settings = nested(_settings(match["settings"] or ""))
            config = preset_config(preset).replace(**settings)
        except ConfigError as error:
            raise ConfigError(f"method {text}: {error}") from error
        label = match["label"] or text.strip()
        return cls(label=label, policy=policy, preset=preset, settings=settings, config=config)

    @property
    def size(self) -> str:
        """A short name of the size for tables."""
        if self.share is None:
            return "all" if self.policy == WHOLE else "own"
        return f"{100 * self.share:g}%"

    @property
    def key(self) -> tuple[str, str]:
        """Label and size, unique in an evaluation."""
        return self.label, self.size

    @property
    def sized(self) -> bool:
        """Whether an evaluation sets the size; not of full attention, nor of a method that states its budget."""
        return self.policy != WHOLE and not self.preset.endswith(FILE) and "budget" not in self.settings

    def config_for(self, context: int) -> SfiConfig:
        """Return the settings for a prompt of `context` tokens; raise `ConfigError` if none is selected."""
        if self.share is None:
            return self.config
        config = self.config if "recent" in self.settings else self.config.replace(recent=self.recent)
        return at_share(config, context, self.share)

    def columns(self, context: int) -> dict[str, Any]:
        """Return the columns of the method in the rows of results."""
        config, whole = self.config_for(context), self.policy == WHOLE
        return {
            "method": self.label,
            "policy": self.policy,
            "preset": self.preset,
            "settings": dict(self.settings),
            "size": self.size,
            "share": self.share,
            "budget": None if whole else config.budget,
            "recent": None if whole else config.recent,
        }


def at_sizes(methods: Sequence[Method], *, shares: Sequence[float], recent: int = 128) -> list[Method]:
    """Return every method at every share, one with a size of its own once; refuse a bad, missing or repeated share."""
    for share in shares:
        if not 0 < share <= 1:
            raise ConfigError(f"share must be in (0, 1], got {share:g}")
    if recent < 1:
        raise ConfigError(f"recent must be positive, got {recent}")
    check_distinct("method", [method.label for method in methods])
    check_distinct("share", shares)
    return [
        replace(method, share=share, recent=recent) if method.sized else method
        for method in methods
        for share in (shares if method.sized else shares[:1])
    ]


def check_distinct(name: str, values: Sequence[Any]) -> None:
    """Raise `ConfigError` if there is no value, or a value twice."""
    if not values:
        raise ConfigError(f"{name} must be given at least once, got none")
    if len(set(values)) < len(values):
        raise ConfigError(f"each {name} must differ, got {', '.join(map(str, values))}")


def at_share(config: SfiConfig, context: int, share: float) -> SfiConfig:
    """Set recent and selected tokens so that they and the sink are a share of the context, the same for every method.

    The recent window takes `config.recent` tokens, at most half of the share. Raise `ConfigError` if none is selected.
    """
    total = int(share * context)
    recent = min(config.recent, total // 2)
    budget = total - recent - config.sink
    if recent < 1 or budget < 1:
        raise ConfigError(
            f"share must leave a selected token beside a sink of {config.sink}, got {share:g} of {context} tokens"
        )
    return config.replace(budget=budget, recent=recent)


def preset_config(preset: str) -> SfiConfig:
    """Return a preset's or TOML file's settings; raise `ConfigError` or `InputError` if there are none."""
    if preset.endswith(FILE):
        return SfiConfig().merge_toml(Path(preset))
    return SfiConfig.preset(preset)


def _settings(text: str) -> Iterator[tuple[str, Any]]:
    # of key=value,key=value; a value is JSON or a bare word
    for assignment in NEXT.split(text) if text else ():
        name, equals, value = map(str.strip, assignment.partition("="))
        if not equals:
            raise ConfigError(f"setting must be key=value, got {assignment!r}")
        try:
            yield name, json.loads(value)
        except (ValueError, RecursionError):
            yield name, value


def nested(settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return settings by name, such as `selector.alpha`, as `SfiConfig.replace` takes them; refuse one twice."""
    tables: dict[str, Any] = {}
    for full, value in settings:
        table, _, name = full.rpartition(".")
        place = tables.setdefault(table, {}) if table else tables
        if not isinstance(place, dict) or name in place:
            raise ConfigError(f"setting {full} must be given once, got it twice")
        place[name] = value
    return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row to make: a method on a sample of a task, or on a window of a text."""

    method: Method
    length: int  # tokens of the prompt
    number: int  # the sample's seed, or the window's number
    task: str = ""  # the task's name; "" for a window

    @property
    def table(self) -> str:
        """The table of the row."""
        return TASKS if self.task else TEXT

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
    return row["method"], row["size"], row.get("task", ""), row["length"], number


class Rows(ABC, Generic[T]):
    """Makes the rows of cells; a prompt, of type T, is read once and decoded under each method."""

    def __init__(self, model: Any, tokenizer: Any, engine: EngineOptions = DEFAULTS) -> None:
        self.model, self.tokenizer, self.engine = model, tokenizer, engine

    @abstractmethod
    def check(self, cells: Sequence[Cell]) -> None:
        """Raise a `ConfigError` or `InputError` for methods, lengths, tasks and texts that cannot run."""

    @abstractmethod
    def draw(self, place: Place) -> T:
        """Return the prompt of a place, with what its score needs."""

    @abstractmethod
    def read(self, prompt: T, methods: Sequence[Method]) -> Any:
        """Read a prompt for some methods; may raise one of `FAILURES`, as `decode`."""

    @abstractmethod
    def decode(self, shared: Any, method: Method, prompt: T) -> Row:
        """Return the results of a method, given what `read` returned."""

    @abstractmethod
    def empty(self, method: Method, prompt: T) -> Row:
        """Return a row without results and error."""

    def make(self, cells: Sequence[Cell]) -> Iterator[Row]:
        """Decode checked cells, prompt after prompt, and yield rows of plain values, an `error` where one failed."""
        for place, group in groupby(cells, lambda cell: cell.place):
            methods, prompt = [cell.method for cell in group], self.draw(place)
            try:
                shared, problem = self.read(prompt, methods), None
            except FAILURES as error:
                shared, problem = None, first_line(error)
            for method in methods:
                row = self.empty(method, prompt) | {"error": problem}
                try:
                    if shared is not None:
                        row |= self.decode(shared, method, prompt)
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
