"""Compare methods with full attention on windows of a text, a row for each method, size and window."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from sfi_core.engine.report import RequestReport
from sfi_core.errors import ConfigError, InputError
from sfi_core.generation.prompts import check_lengths
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.measure.evaluation.fidelity import Fidelity, fidelity, reference
from sfi_core.measure.evaluation.method import WHOLE, Method, MethodVariant, Size, check_distinct
from sfi_core.measure.evaluation.runner import FAILURES, Key
from sfi_core.measure.evaluation.text_windows import Window, text_ids, windows
from sfi_core.models.load import first_line
from sfi_core.settings.engine import DEFAULTS, EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGrid:
    """The rows of a comparison: every method but full attention, at every size, on every window.

    Attributes:
        methods: The methods that decode.
        sizes: How much a fast step may read.
        text: The text.
        lengths: Tokens of the windows' prompts.
        tokens: Tokens of each continuation, which are decoded.
        count: Windows of each length.
        table: The table of the rows.
    """

    methods: tuple[Method, ...]
    sizes: tuple[Size, ...]
    text: str
    lengths: tuple[int, ...]
    tokens: int
    count: int
    table: ClassVar[str] = "fidelity"

    def __post_init__(self) -> None:
        """Reject an empty grid, and one with two methods or sizes of one name.

        Raises:
            ConfigError: The grid is one of these.
        """
        check_distinct(
            {
                "method": [method.label for method in self.methods],
                "size": [size.label for size in self.sizes],
                "length": self.lengths,
            }
        )
        if not self.variants:
            raise ConfigError(f"fidelity must have a method besides {WHOLE}, got none")
        for name, value in (("tokens", self.tokens), ("windows", self.count)):
            # the first token follows from the prompt, which every method reads densely
            least = 2 if name == "tokens" else 1
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")

    @property
    def variants(self) -> list[MethodVariant]:
        """The methods at their sizes, each of which decodes every window."""
        methods = [method for method in self.methods if method.policy != WHOLE]
        return [one for method in methods for one in method.variants(self.sizes)]

    @property
    def keys(self) -> list[Key]:
        """The keys of all rows, in the order in which they come."""
        return [
            (*one.key, length, window)
            for window in range(self.count)
            for length in self.lengths
            for one in self.variants
        ]

    def key(self, row: Mapping[str, Any]) -> Key:
        """Return a row's key."""
        return row["method"], row["size"], row["length"], row["window"]

    def weight(self, key: Key) -> int:
        """Return the context of a row, which its time grows with."""
        return int(key[2])

    def check(self, model: Any, tokenizer: Any) -> None:
        """Refuse, before anything runs, a text that is too short and windows that the model cannot hold.

        Raises:
            InputError: The text is too short, or a window too long.
            ConfigError: A size selects nothing.
        """
        for length in self.lengths:
            for window in self.windows(tokenizer, length):
                check_lengths(model, [window.ids], 0)
            for one in self.variants:
                one.config(length)

    def windows(self, tokenizer: Any, length: int) -> list[Window]:
        """Spread the windows of a length over the text.

        Raises:
            InputError: The text is too short.
        """
        ids, prefix = text_ids(tokenizer, self.text)
        return windows(ids, length, self.tokens, self.count, prefix)

    def run(
        self,
        model: Any,
        tokenizer: Any,
        done: AbstractSet[Key] = frozenset(),
        *,
        backend: str = "auto",
        prefill_chunk: int = 0,
        engine: EngineOptions = DEFAULTS,
    ) -> Iterator[dict[str, Any]]:
        """Decode each continuation with its own tokens; the arguments are those of `TaskGrid.run`.

        Yields:
            A plain row for each method and window, with an entry per step in `steps`, or with an `error`.
        """
        for number in range(self.count):
            for length in self.lengths:
                pending = [one for one in self.variants if (*one.key, length, number) not in done]
                if not pending:
                    continue
                window = self.windows(tokenizer, length)[number]
                full = reference(
                    model, tokenizer, window, prefill_chunk=prefill_chunk, backend=backend
                )
                for one in pending:
                    row = {
                        **one.columns(length),
                        "length": length,
                        "tokens": self.tokens,
                        "window": number,
                    }
                    try:
                        found = fidelity(
                            model,
                            tokenizer,
                            full,
                            one.config(length),
                            policy=one.method.policy,
                            backend=backend,
                            engine=engine_for(one.method.policy, engine),
                        )
                    except FAILURES as error:
                        yield row | {"steps": None, "report": None, "error": first_line(error)}
                        continue
                    yield row | {**to_row(found), "error": None}


def to_row(found: Fidelity) -> dict[str, Any]:
    """Return a window's steps and report in plain values."""
    values = asdict(found)
    (report,) = values.pop("reports")
    return {"steps": values, "report": report}


def from_rows(rows: Sequence[Mapping[str, Any]]) -> Fidelity:
    """Put the steps of some windows together again."""
    known = {field.name for field in fields(RequestReport)}
    return Fidelity.join(
        Fidelity(
            **row["steps"],
            reports=[RequestReport(**{k: v for k, v in row["report"].items() if k in known})],
        )
        for row in rows
    )


def read_text(path: Any) -> str:
    """Read a text file.

    Raises:
        InputError: The file cannot be read, or is not UTF-8.
    """
    try:
        text: str = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"text {path} is not UTF-8: {error.reason}") from error
    return text
