r"""T_trig of Eq. 5: which token ids of a tokenizer end a sentence, found once, before decoding.

Works with any tokenizer (byte-level BPE, SentencePiece, WordPiece, Unigram): what counts is a
token's decoded text. A trigger string stands for the tokens

* whose text ends with it or its CJK form, closing quotes, brackets, emphasis and whitespace apart,
  if it is a punctuation mark: `.` takes `...`, `."`, `.\n`, `?.`; `!` takes `?!` but not `!=`;
* whose text has it in the whitespace at its end, if it is whitespace: `\n` takes ` \n`, `\n\n` and
  `\n  `, and also `)\n` and `:\n`, which other tokenizers write as two tokens;
* whose text is the string, a space before it or not, if it is neither: `</think>`, `###`, `Mr.`.

Tokens with a letter or digit (`3.`, `Mr.`), special tokens and tokens that hold part of a character
follow the third rule only. Eq. 5 sees ids: the dot of `3.14` is a trigger where the tokenizer keeps
it as a separate `.`. That costs a slow step, not quality. Paper gap: which merged tokens count.
"""

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from sfi_core.errors import ConfigError
from sfi_core.settings.config import SfiConfig

# marks of other scripts and the one-character ellipsis are triggers of their own
CJK_FORMS = {".": "。．｡", "?": "？", "!": "！", ";": "；"}  # noqa: RUF001
TRAILING = string.whitespace + "\u00a0\u3000\"')]}*`’‘”“›‹»«」』）］｝〕〉》】｣"  # noqa: RUF001
ASCII_WORD = re.compile(r"[A-Za-z0-9]")
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's fallback: `<0x0A>` is a newline
Tokens = Sequence[tuple[int, str]]


class Tokenizer(Protocol):
    """What the builder asks of a tokenizer; those of transformers have it."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of bos, eos, pad and the like."""

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every piece, added tokens included."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""

    def batch_decode(self, sequences: list[list[int]], /) -> list[str]:
        """Return the text of each sequence of ids."""


@dataclass(frozen=True, slots=True)
class TriggerSet:
    """T_trig, and where each of its ids comes from.

    Attributes:
        token_ids: The ids that make a step slow.
        chosen: For each trigger that has tokens: their ids, ascending, and decoded texts.
        reasons: For each trigger that has none: why.
    """

    token_ids: frozenset[int]
    chosen: Mapping[str, Tokens]
    reasons: Mapping[str, str]

    @property
    def sorted_token_ids(self) -> tuple[int, ...]:
        """The ids, ascending."""
        return tuple(sorted(self.token_ids))

    @property
    def missing(self) -> tuple[str, ...]:
        """The triggers that have no token."""
        return tuple(self.reasons)

    def describe(self) -> list[tuple[str, int, str]]:
        """Return a row per trigger: its repr, its number of tokens, examples or the reason."""
        found = [
            (repr(trigger), len(tokens), " ".join(repr(text) for _, text in tokens[:4]))
            for trigger, tokens in self.chosen.items()
        ]
        return found + [(repr(trigger), 0, reason) for trigger, reason in self.reasons.items()]


def build_trigger_set(tokenizer: Tokenizer, triggers: Sequence[str]) -> TriggerSet:
    """Find the tokens that each trigger stands for, by this module's rules.

    Args:
        tokenizer: Any object with the members of `Tokenizer`.
        triggers: Trigger strings. Empty gives an empty set: only T_max makes steps slow then.

    Raises:
        ConfigError: A trigger is empty, or none of the triggers has a token.
    """
    if "" in triggers:  # as it is in any bare string
        raise ConfigError(f"triggers must be a list of non-empty strings, got {triggers!r}")
    vocab = tokenizer.get_vocab()
    wordless = _wordless_tokens(tokenizer, vocab)
    found = {
        trigger: [token for token in wordless if _ends_with(token[1], trigger)]
        if trigger.isspace() or (len(trigger) == 1 and not _has_word(trigger))
        else _exact_tokens(tokenizer, vocab, trigger)
        for trigger in triggers
    }
    chosen = {trigger: tokens for trigger, tokens in found.items() if tokens}
    if found and not chosen:
        raise ConfigError(f"triggers must match a token of this tokenizer, got {[*found]}")
    reasons = {trigger: _reason(tokenizer, trigger) for trigger in found if trigger not in chosen}
    return TriggerSet(frozenset(i for t in chosen.values() for i, _ in t), chosen, reasons)


def _wordless_tokens(tokenizer: Tokenizer, vocab: Mapping[str, int]) -> Tokens:
    """List the tokens without letters and digits; ASCII ones are never decoded, for speed."""
    special = set(tokenizer.all_special_ids)
    with suppress(NotImplementedError):  # Mistral's own tokenizer lists all of them above
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special.update(i for i, token in added.items() if token.special)
    kept = (p for p in vocab if not ASCII_WORD.search(p) or BYTE_PIECE.fullmatch(p))
    ids = sorted({vocab[piece] for piece in kept} - special)
    return [token for token in _decode(tokenizer, ids) if not _has_word(token[1])]


def _exact_tokens(tokenizer: Tokenizer, vocab: Mapping[str, int], trigger: str) -> Tokens:
    """List the tokens whose text is the trigger, with or without a space before it."""
    ids = {vocab[trigger]} if trigger in vocab else set()
    for text in (trigger, f" {trigger}"):
        ids.update(tokenizer.encode(text, add_special_tokens=False))
    return [t for t in _decode(tokenizer, sorted(ids)) if t[1].removeprefix(" ") == trigger]


def _reason(tokenizer: Tokenizer, trigger: str) -> str:
    tokens = _decode(tokenizer, tokenizer.encode(trigger, add_special_tokens=False))
    return f"no single token; written as {' '.join(repr(t[1]) for t in tokens) or 'nothing'}"


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> Tokens:
    texts = tokenizer.batch_decode([[i] for i in ids]) if ids else []  # transformers: [] gives [""]
    return list(zip(ids, texts, strict=True))


def _has_word(text: str) -> bool:
    """Whether the text has a letter, mark or digit, or part of a character, which may be one."""
    return any(char == "\ufffd" or unicodedata.category(char)[0] in "LMN" for char in text)


def _ends_with(text: str, trigger: str) -> bool:
    if trigger.isspace():
        return trigger in text[len(text.rstrip()) :]
    closed = TRAILING.replace(trigger, "")
    return text.rstrip(closed).endswith((trigger, *CJK_FORMS.get(trigger, "")))


def resolve_triggers(tokenizer: Any, config: SfiConfig) -> tuple[int, ...]:
    """Return T_trig as token ids, ascending.

    Raises:
        ConfigError: Trigger strings are needed and there is no tokenizer, or none of them is a token.
    """
    if config.trigger_token_ids is not None:
        return tuple(sorted(config.trigger_token_ids))
    if config.trigger_policy != "boundary":
        return ()
    if tokenizer is None:
        raise ConfigError("triggers need a tokenizer, got none; pass one or set trigger_token_ids")
    return tuple(sorted(build_trigger_set(tokenizer, config.triggers).token_ids))
