"""Compare methods with full attention on windows of a text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from itertools import product
from typing import Any

from sfi_core.engine.report import RequestReport
from sfi_core.errors import ConfigError, InputError
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.measure.evaluation.fidelity import (
    Fidelity,
    Reference,
    Window,
    fidelity,
    ids_and_prefix,
    reference,
    windows,
)
from sfi_core.measure.evaluation.grid import Cell, Place, Row, Rows
from sfi_core.measure.evaluation.method import WHOLE, Method, check_distinct
from sfi_core.settings.engine import DEFAULTS, EngineOptions


def window_cells(methods: Sequence[Method], lengths: Sequence[int], count: int, tokens: int) -> list[Cell]:
    """List every method on `count` windows of each length, the first window of all lengths first.

    Full attention, the reference, has no cells. Raise `ConfigError` if no other method is given, for no window, for
    less than 2 decoded `tokens`, and for lengths that are none or come twice.
    """
    check_distinct("length", lengths)
    compared = [method for method in methods if method.policy != WHOLE]
    if not compared:
        raise ConfigError(f"fidelity must have a method besides {WHOLE}, got none")
    # the first token is the same under every method: the prompt is read densely
    for name, value, least in (("tokens", tokens, 2), ("windows", count, 1)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    grid = product(range(count), lengths, compared)
    return [Cell(method=method, length=length, number=number) for number, length, method in grid]


class WindowRows(Rows[Window]):
    """Makes the rows of windows: a continuation is decoded with its own tokens; an entry of `steps` a step."""

    def __init__(
        self, model: Any, tokenizer: Any, engine: EngineOptions = DEFAULTS, *, text: str, tokens: int, count: int
    ) -> None:
        """Take a text and how it is cut: into `count` windows of each length, with `tokens` that are decoded."""
        super().__init__(model, tokenizer, engine)
        self._text, self._tokens, self._count = text, tokens, count
        self.windows = cache(self._windows)

    def _windows(self, length: int) -> list[Window]:
        # spread over the text; `InputError` if the text is too short
        ids, prefix = ids_and_prefix(self.tokenizer, self._text)
        return windows(ids, length, self._tokens, self._count, prefix)

    def check(self, cells: Sequence[Cell]) -> None:
        """Check the cells before anything runs.

        Raises:
            InputError: The text is too short, or a window too long.
            ConfigError: A size selects no token.
        """
        limit = self.positions(cells)
        for length in dict.fromkeys(cell.length for cell in cells):
            whole = len(self.windows(length)[0].ids)
            if limit is not None and whole > limit:
                raise InputError(
                    f"fidelity of length {length} must fit the model's {limit} positions, "
                    f"got {length} prompt and {whole - length} new tokens"
                )
        for cell in cells:
            cell.method.config_for(cell.length)

    def draw(self, place: Place) -> Window:
        """Return a window."""
        number, length, _ = place
        return self.windows(length)[number]

    def read(self, prompt: Window, methods: Sequence[Method]) -> Reference:
        """Decode the window under full attention."""
        return reference(self.model, self.tokenizer, [prompt], engine=self.engine)

    def decode(self, shared: Reference, method: Method, prompt: Window) -> Row:
        """Decode the window by one method, and compare."""
        (part,) = fidelity(
            self.model, self.tokenizer, shared, method.config_for(prompt.prompt_tokens),
            policy=method.policy, engine=engine_for(method.policy, self.engine),
        )  # fmt: skip
        values = asdict(part)
        (report,) = values.pop("reports")
        return self.empty(method, prompt) | {"steps": values, "report": report}

    def empty(self, method: Method, prompt: Window) -> Row:
        """See `Rows`."""
        return {
            **method.columns(prompt.prompt_tokens),
            "length": prompt.prompt_tokens,
            "tokens": self._tokens,
            "window": prompt.number,
            "steps": None,
            "report": None,
            "error": None,
        }


def from_rows(rows: Sequence[Mapping[str, Any]]) -> Fidelity:
    """Join the steps of the windows of some rows."""
    known = {field.name for field in fields(RequestReport) if field.init}
    return Fidelity.join(
        Fidelity(**row["steps"], reports=[RequestReport(**{k: v for k, v in row["report"].items() if k in known})])
        for row in rows
    )
