"""Matches trigger strings with a trace's tokens, without a tokenizer."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from sfi_core.errors import ConfigError, TraceError
from sfi_core.triggers.trigger_set import build_trigger_set
from sfi_traces.model.trace import Trace


class RecordedVocabulary:
    """Stands in for a tokenizer: its vocabulary is the generated tokens, the only ones that can trigger.

    Special tokens are unknown: one without letters or digits counts by its text.
    """

    all_special_ids: list[int] = []  # noqa: RUF012 - the interface of a tokenizer

    def __init__(self, texts: Mapping[int, str]) -> None:
        self.texts = texts

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> "RecordedVocabulary":
        """Collect the tokens of traces of one model; raises `TraceError` for one without texts."""
        texts: dict[int, str] = {}
        for trace in traces:
            table = trace.table("steps", ["token_id", "token_text"])
            if table["token_id"].null_count:
                raise TraceError(f"trace {trace.path} is redacted; it can be replayed with its own triggers only")
            if table["token_text"].null_count:
                raise TraceError(
                    f"trace {trace.path} has no text of its tokens; it can be replayed with its own triggers only"
                )
            pairs = zip(table["token_id"].to_pylist(), table["token_text"].to_pylist(), strict=True)
            texts.update(pairs)
        return cls(texts)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token; a count makes equal texts distinct."""
        return {text + "\0" * rank: i for rank, (i, text) in enumerate(self.texts.items())}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens whose text is the whole text."""
        return [i for i, own in self.texts.items() if own == text]

    def batch_decode(self, sequences: list[list[int]], /) -> list[str]:
        """Return the text of each sequence of ids."""
        return ["".join(self.texts[i] for i in chain(sequence)) for sequence in sequences]

    def trigger_ids(self, triggers: Sequence[str]) -> frozenset[int]:
        """Return the generated tokens that the triggers match, by the rules of a run; maybe none.

        Raises `ConfigError` for an empty trigger.
        """
        if not all(triggers):
            raise ConfigError(f"triggers must be non-empty strings, got {list(triggers)}")
        with suppress(ConfigError):  # none of them was generated
            return frozenset(build_trigger_set(self, triggers).token_ids)
        return frozenset()
