r"""The trigger: decides which steps are slow, by Eq. 5 and T_max or by one of the other rules; and its tokens.

T_trig of Eq. 5 are the token ids of any tokenizer that end a sentence, found once, before decoding: only the decoded
text of a token counts. A trigger string selects tokens by one of three rules:

* A punctuation mark: the text ends with the mark or its CJK form, ignoring closing quotes, brackets, emphasis and
  whitespace. `.` selects `...`, `."`, `.\n`, `?.`; `!` selects `?!` but not `!=`.
* Whitespace: the string is in the whitespace at the end of the text. `\n` selects ` \n`, `\n\n`, `\n  `, and also
  `)\n` and `:\n`, which other tokenizers write as two tokens.
* Anything else: the text is the string, with or without a space before it: `</think>`, `###`, `Mr.`.

Tokens with a letter or digit (`3.`, `Mr.`), special tokens and tokens that hold part of a character follow the third
rule only. A dot of `3.14` that is a token costs a slow step, not quality. Paper gap: which merged tokens count.
"""

import random
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sfi_core.errors import ConfigError
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState

# marks of other scripts and the one-character ellipsis are triggers of their own
CJK_FORMS = {".": "。．｡", "?": "？", "!": "！", ";": "；"}  # noqa: RUF001
TRAILING = string.whitespace + "\u00a0\u3000\"')]}*`’‘”“›‹»«」』）］｝〕〉》】｣"  # noqa: RUF001
ASCII_WORD = re.compile(r"[A-Za-z0-9]")
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's fallback: `<0x0A>` is a newline
Tokens = Sequence[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Trigger:
    """The trigger set T_trig, as token ids, under the `trigger_policy` of the settings."""

    token_ids: frozenset[int]
    config: SfiConfig

    def reason(self, state: RequestState) -> str:
        """Return why the step after `state.step` is slow, or "" if it is fast (Eq. 5).

        Step 0 is the prefill's last position and always slow (g_0 = 1): ask for later steps only.
        Paper gap: a trigger within `min_gap` steps of the last slow step is dropped, not put off; with
        `trigger_delay` d the boundary token x_{t-1-d} makes step t slow; tokens of the prompt never trigger.
        """
        config, policy = self.config, self.config.trigger_policy
        if state.step + 1 < config.slow_start:
            return "first"
        if policy == "always":
            return "always"
        gap = state.steps_since_slow + 1
        if policy == "stride":
            return "stride" if gap >= config.stride else ""
        boundary = state.step - config.trigger_delay  # x_{t-1-d}, for the step t to come
        token = state.tokens[boundary] if 0 <= boundary < len(state.tokens) else None
        if policy == "boundary" and gap >= config.min_gap and token in self.token_ids:
            return "trigger"
        if policy == "random" and gap >= config.min_gap:
            # the seed holds the request's own text, and nothing that depends on the batch
            seed = f"{config.trigger_seed} {state.prompt_tokens} {state.step + 1} {token}"
            if random.Random(seed).random() < config.random_rate:  # noqa: S311 - no secret
                return "random"
        due = policy != "never" and state.steps_since_slow >= config.t_max
        return "t_max" if due else ""


@dataclass(frozen=True, slots=True)
class TriggerSet:
    """T_trig, `token_ids`; `chosen` has by trigger the ids and decoded texts."""

    token_ids: tuple[int, ...]
    chosen: Mapping[str, Tokens]

    def describe(self) -> list[tuple[str, int, str]]:
        """Return a row for each trigger: its repr, its number of tokens, and examples."""
        return [
            (repr(trigger), len(tokens), " ".join(repr(text) for _, text in tokens[:4]) or "no single token")
            for trigger, tokens in self.chosen.items()
        ]


def build_trigger_set(tokenizer: Any, triggers: Sequence[str]) -> TriggerSet:
    """Find the tokens of each trigger; raise `ConfigError` for an empty trigger, or if none of them has a token."""
    if "" in triggers:  # also True for a bare string in place of a list
        raise ConfigError(f"triggers must be a list of non-empty strings, got {triggers!r}")
    vocab = tokenizer.get_vocab()
    wordless = _wordless_tokens(tokenizer, vocab)
    chosen = {
        trigger: [token for token in wordless if _ends_with(token[1], trigger)]
        if trigger.isspace() or (len(trigger) == 1 and not _has_word(trigger))
        else _exact_tokens(tokenizer, vocab, trigger)
        for trigger in triggers
    }
    ids = {token_id for tokens in chosen.values() for token_id, _ in tokens}
    if chosen and not ids:
        raise ConfigError(f"triggers must match a token of this tokenizer, got {[*chosen]}")
    return TriggerSet(tuple(sorted(ids)), chosen)


def _wordless_tokens(tokenizer: Any, vocab: Mapping[str, int]) -> Tokens:
    # those without letters and digits; for speed, pieces with ASCII ones are not decoded
    special = set(tokenizer.all_special_ids)
    with suppress(NotImplementedError):  # Mistral's own tokenizer lists all of them above
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special.update(i for i, token in added.items() if token.special)
    pieces = (p for p in vocab if not ASCII_WORD.search(p) or BYTE_PIECE.fullmatch(p))
    ids = sorted({vocab[piece] for piece in pieces} - special)
    return [token for token in _decode(tokenizer, ids) if not _has_word(token[1])]


def _exact_tokens(tokenizer: Any, vocab: Mapping[str, int], trigger: str) -> Tokens:
    ids = {vocab[trigger]} if trigger in vocab else set()
    for text in (trigger, f" {trigger}"):
        ids.update(tokenizer.encode(text, add_special_tokens=False))
    return [t for t in _decode(tokenizer, sorted(ids)) if t[1].removeprefix(" ") == trigger]


def _decode(tokenizer: Any, ids: Sequence[int]) -> Tokens:
    texts = tokenizer.batch_decode([[i] for i in ids]) if ids else []  # transformers: [] gives [""]
    return list(zip(ids, texts, strict=True))


def _has_word(text: str) -> bool:
    # a letter, mark, digit, or part of a character, which may be one of these
    return any(char == "\ufffd" or unicodedata.category(char)[0] in "LMN" for char in text)


def _ends_with(text: str, trigger: str) -> bool:
    if trigger.isspace():
        return trigger in text[len(text.rstrip()) :]
    closed = TRAILING.replace(trigger, "")
    return text.rstrip(closed).endswith((trigger, *CJK_FORMS.get(trigger, "")))


def resolve_triggers(tokenizer: Any, config: SfiConfig, *, needed: bool = True) -> tuple[int, ...]:
    """Return T_trig as token ids, ascending; () without a tokenizer if they are not `needed`.

    Raise `ConfigError` for trigger strings without a tokenizer, or if none of them has a token.
    """
    if config.trigger_token_ids is not None:
        return tuple(sorted(config.trigger_token_ids))
    if config.trigger_policy != "boundary" or (tokenizer is None and not needed):
        return ()
    if tokenizer is None:
        raise ConfigError("triggers need a tokenizer, got none; pass one or set trigger_token_ids")
    return build_trigger_set(tokenizer, config.triggers).token_ids
