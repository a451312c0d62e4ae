"""What the parts of the study share: the model, the windows, and making only the rows that a file lacks."""

import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.study.listed import FULL, Listed, read_methods
from benchmarks.study.records import Key, about_run, begin
from benchmarks.study.texts import Place, text_digest, windows_of
from sfi_core.errors import SfiError
from sfi_core.models.load import load

Row = dict[str, Any]
# errors of one row, after which the other rows go on; a policy on sizes that it cannot take is RuntimeError
FAILURES = (SfiError, RuntimeError, MemoryError, torch.OutOfMemoryError)


class Part(ABC):
    """A part of the study: its items, such as windows of text, and the rows of each.

    Attributes:
        name: The command's name, and that of the file of rows.
        columns: What tells rows apart.
        table: The table of `methods.toml` that the part compares; None where it compares no methods.
    """

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    table: ClassVar[str | None] = None

    def __init__(self, options: Namespace) -> None:
        self.options = options
        name = None if options.model == "bundled" else options.model
        self.model, self.tokenizer = load(name, device="cpu", dtype=options.dtype)
        self.model_name = Path(options.model).name.removesuffix(".gguf")  # rows name no folder of a machine
        table = getattr(options, "table", self.table)
        self.methods: list[Listed] = [] if table is None else read_methods(table, self.tokenizer, options.methods)
        texts = {
            f"{kind}/{half}": text_digest(kind, half)
            for kind in getattr(options, "kinds", ())
            for half in options.halves
        }
        about = about_run(self.model, self.model_name) | {"texts": texts}
        self.records = begin(options.out / f"{self.name}.jsonl", self.columns, about)
        self.key = self.records.key

    def items(self) -> Sequence[Any]:
        """Return the windows asked for, number by number: a cut run has all kinds. Short texts have fewer."""

        @cache
        def have(place: Place) -> int:
            size = place.length + self.options.tokens
            return windows_of(self.tokenizer, place.kind, place.half, size)

        asked = (
            Place(number, kind, half, length)
            for number in self.options.windows
            for length in self.options.lengths
            for half in self.options.halves
            for kind in self.options.kinds
        )
        return [place for place in asked if place.number < have(replace(place, number=0))]

    def rows(self, item: Any) -> list[Row]:
        """Return what names an item's rows: one of full attention, one of each method and share."""
        where = self.where(item)
        return [
            {**where, "method": FULL, "share": None},
            *({**where, "method": listed.text, "share": listed.share} for listed in self.methods),
        ]

    def where(self, place: Place) -> Row:
        """Return what all rows of a window have in common."""
        return {"model": self.model_name, **place.columns(), "tokens": self.options.tokens}

    @abstractmethod
    def make(self, item: Any, pending: set[Key]) -> Iterator[Row]:
        """Make an item's rows whose keys are pending, and any others that come with them.

        Raises:
            InputError: The half of a kind has no such window.
        """

    def run(self) -> None:
        """Make the rows that are missing; several processes may each do some of the windows."""
        done, items = self.records.done(), self.items()
        missing = [{key for key in map(self.key, self.rows(item)) if key not in done} for item in items]
        left, done, began = sum(map(len, missing)), 0, time.monotonic()
        print(f"{left} rows to make of {len(items)} items", flush=True)
        for item, pending in zip(items, missing, strict=True):
            for row in self.make(item, pending) if pending else ():
                if self.key(row) in pending:
                    self.records.add(row)
                    done += 1
            if pending:
                minutes = (time.monotonic() - began) / 60
                print(f"{item}: {done} of {left} rows made in {minutes:.0f} min", flush=True)
