"""Named trigger sets: the trace's own, punctuation, and sets from the user."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sfi_core.errors import ConfigError
from sfi_traces.model.trace import Trace
from sfi_traces.replay import RecordedVocabulary, Setting

PUNCTUATION: dict[str, tuple[str, ...]] = {
    "sentence": (".", "?", "!"),
    "paper": (".", "?", "!", ";", "\n"),
    "clause": (".", "?", "!", ";", "\n", ",", ":"),
    "line": ("\n",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSet:
    """A trigger set.

    Attributes:
        token_ids: T_trig; for `strings` only the ids that the traces generated, all that a replay needs.
        strings: Strings that a tokenizer turns into the set; None if only ids are known.
        texts: The tokens' texts, if known.
    """

    name: str
    token_ids: frozenset[int]
    strings: tuple[str, ...] | None = None
    texts: tuple[str, ...] = ()


def recorded_set(base: Setting) -> NamedSet:
    """Return the trace's own set."""
    config = base.config
    strings = config.triggers if config.trigger_token_ids is None else None
    return NamedSet(name=base.triggers, token_ids=base.trigger_token_ids, strings=strings)


def punctuation_sets(traces: Sequence[Trace]) -> list[NamedSet]:
    """Build the punctuation sets from the generated tokens; none for a redacted trace."""
    if any(trace.manifest["redacted"] for trace in traces):
        return []
    return given_sets(traces, PUNCTUATION)


def given_sets(traces: Iterable[Trace], strings: Mapping[str, Sequence[str]]) -> list[NamedSet]:
    """Build named sets by matching strings with the generated tokens; raises as `RecordedVocabulary`."""
    vocabulary = RecordedVocabulary.of(traces)
    return [
        NamedSet(name=name, token_ids=vocabulary.trigger_ids(body), strings=tuple(body))
        for name, body in strings.items()
    ]


def distinct(sets: Iterable[NamedSet], generated: Iterable[int]) -> list[NamedSet]:
    """Drop sets that equal an earlier one on the generated tokens, and empty ones but for the first set.

    Raises `ConfigError` if two sets have one name.
    """
    known = frozenset(generated)
    found: dict[frozenset[int], NamedSet] = {}
    names: set[str] = set()
    for one in sets:
        if one.name in names:
            raise ConfigError(f"trigger-set must have a name of its own, got {one.name!r} twice")
        names.add(one.name)
        key = one.token_ids & known
        if key or not found:
            found.setdefault(key, one)
    return list(found.values())
