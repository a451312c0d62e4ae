"""Compare methods with full attention on windows of a text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from typing import Any, ClassVar

from sfi_core.engine.report import RequestReport
from sfi_core.errors import ConfigError, InputError
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.measure.evaluation.fidelity import Fidelity, Reference, Window, fidelity, reference, text_ids, windows
from sfi_core.measure.evaluation.grid import Grid, Key, Left, Row, Together
from sfi_core.measure.evaluation.method import WHOLE, MethodVariant
from sfi_core.settings.engine import EngineOptions

Placed = tuple[int, Window]  # a window of a length, with its number


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGrid(Grid):
    """The rows of every method at every size on every window.

    Full attention and lossless methods have no rows: they would equal the reference.

    Attributes:
        tokens: Tokens of each continuation, which are decoded.
        count: Windows of each length.
    """

    text: str
    tokens: int
    count: int
    table: ClassVar[str] = "fidelity"
    place: ClassVar[tuple[str, ...]] = ("length", "window")

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an empty grid or a value given twice."""
        self.check_distinct()
        if not self.variants:
            raise ConfigError(
                f"fidelity must have a method besides {WHOLE} and lossless ones, which are full attention, got none"
            )
        # the first token is the same under every method: the prompt is read densely
        for name, value, least in (("tokens", self.tokens, 2), ("windows", self.count, 1)):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")

    @property
    def variants(self) -> list[MethodVariant]:
        """The methods at their sizes, without those that are full attention."""
        methods = [method for method in self.methods if method.policy != WHOLE and not method.lossless]
        return [one for method in methods for one in method.variants(self.sizes)]

    def places(self) -> list[Key]:
        """List length and number of each window, the first window of all lengths first."""
        return [(length, window) for window in range(self.count) for length in self.lengths]

    def check(self, model: Any, tokenizer: Any) -> None:
        """Check the grid before anything runs.

        Raises:
            InputError: The text is too short, or a window too long.
            ConfigError: A size selects no token.
        """
        limit = self.positions_of(model)
        for length in self.lengths:
            whole = len(self.windows(tokenizer, length)[0].ids)
            if limit is not None and whole > limit:
                raise InputError(
                    f"fidelity of length {length} must fit the model's {limit} positions, "
                    f"got {length} prompt and {whole - length} new tokens"
                )
            for one in self.variants:
                one.config(length)

    def windows(self, tokenizer: Any, length: int) -> list[Window]:
        """Spread the windows of a length over the text; raise `InputError` if the text is too short."""
        ids, prefix = text_ids(tokenizer, self.text)
        return windows(ids, length, self.tokens, self.count, prefix)

    def rows(self, model: Any, tokenizer: Any, engine: EngineOptions, batch_size: int, left: Left) -> Iterator[Row]:
        """See `Grid`: decode each continuation with its own tokens; a row has an entry per step in `steps`."""
        places, spread = self.places(), cache(partial(self.windows, tokenizer))

        def drawn(unit: int) -> Placed:
            length, number = places[unit]
            return number, spread(length)[number]

        yield from self._together(model, tokenizer, engine).run(self._batches(batch_size), drawn, left)

    def _together(self, model: Any, tokenizer: Any, engine: EngineOptions) -> Together[Placed]:
        def read(units: Sequence[Placed], _: Any) -> Reference:
            return reference(model, tokenizer, [window for _, window in units], engine=engine)

        def decode(full: Reference, one: MethodVariant, units: Sequence[Placed]) -> list[dict[str, Any]]:
            policy, length = one.method.policy, units[0][1].prompt_tokens
            own, config = engine_for(policy, engine), one.config(length)
            found = fidelity(model, tokenizer, full, config, policy=policy, engine=own)
            pairs = zip(units, found, strict=True)
            return [self._row(one, unit) | to_row(part) for unit, part in pairs]

        return Together(read=read, decode=decode, empty=self._row)

    def _row(self, variant: MethodVariant, unit: Placed) -> dict[str, Any]:
        number, length = unit[0], unit[1].prompt_tokens
        return {
            **variant.columns(length),
            "length": length,
            "tokens": self.tokens,
            "window": number,
            "steps": None,
            "report": None,
            "error": None,
        }

    def _batches(self, size: int) -> Iterator[list[int]]:
        # batches of units of one length; for size 1 in the order of the keys
        for first in range(0, self.count, size):
            numbers = range(first, min(first + size, self.count))
            for length in range(len(self.lengths)):
                yield [number * len(self.lengths) + length for number in numbers]


def to_row(found: Fidelity) -> dict[str, Any]:
    """Return a window's steps and report in plain values."""
    values = asdict(found)
    (report,) = values.pop("reports")
    return {"steps": values, "report": report}


def from_rows(rows: Sequence[Mapping[str, Any]]) -> Fidelity:
    """Join the steps of the windows of some rows; the inverse of `to_row`."""
    known = {field.name for field in fields(RequestReport) if field.init}
    return Fidelity.join(
        Fidelity(**row["steps"], reports=[RequestReport(**{k: v for k, v in row["report"].items() if k in known})])
        for row in rows
    )
