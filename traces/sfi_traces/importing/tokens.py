"""Reads the tokens from a file of arrays, which has one request."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from sfi_core.errors import InputError
from sfi_traces.importing.arrays import Arrays
from sfi_traces.importing.schema import LARGEST, Ints, Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """A request's prompt, generated ids and texts, T_trig and model; what the file does not say is None."""

    prompt: Prompt
    token_ids: Ints
    texts: list[str] | None
    triggers: tuple[int, ...] | None
    model: str | None

    @classmethod
    def of(cls, arrays: Arrays, steps: int | None) -> Self:
        """Read the tokens of a file with N = `steps` steps; None if the tokens alone say how many.

        Raises `InputError` if tokens are missing, or are not as many as the steps.
        """
        token_ids = _ids(arrays, "token_ids")
        if steps is not None and len(token_ids) != steps:
            raise InputError(f"token_ids of {arrays.path} must be {steps:,}, one for each step, got {len(token_ids):,}")
        triggers = arrays.maybe("trigger_token_ids", "iu", (1,))
        model = arrays.maybe("model", "U", (0,))
        return cls(
            prompt=_prompt(arrays),
            token_ids=token_ids,
            texts=_texts(arrays, "token_texts", len(token_ids)),
            triggers=None if triggers is None else tuple(sorted(triggers.tolist())),
            model=None if model is None else str(model),
        )


def _prompt(arrays: Arrays) -> Prompt:
    tokens = arrays.number("prompt_tokens", least=1)
    if "prompt_token_ids" not in arrays.names:
        if tokens is None:
            raise InputError(f"import {arrays.path} must have prompt_token_ids or prompt_tokens, got neither")
        return Prompt(tokens=tokens)
    ids = _ids(arrays, "prompt_token_ids")
    if tokens is not None and tokens != len(ids):
        raise InputError(f"prompt_tokens of {arrays.path} must be {len(ids):,}, as the ids are, got {tokens:,}")
    return Prompt(tokens=len(ids), token_ids=ids, texts=_texts(arrays, "prompt_token_texts", len(ids)))


def _ids(arrays: Arrays, name: str) -> Ints:
    ids = arrays.array(name, "iu", (1,))
    check_ids(ids, f"{name} of {arrays.path}")
    return ids


def check_ids(ids: Ints, what: str) -> None:
    """Raise `InputError` for an empty list of token ids, or an id that is negative or above `LARGEST`."""
    if not len(ids):
        raise InputError(f"{what} must have an id, got none")
    wrong = (ids < 0) | (ids > LARGEST)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"{what} must be in 0 to {LARGEST}, got {ids[at]} at {at}")


def _texts(arrays: Arrays, name: str, tokens: int) -> list[str] | None:
    texts = arrays.maybe(name, "U", (1,))
    if texts is not None and len(texts) != tokens:
        raise InputError(f"{name} of {arrays.path} must be {tokens:,}, as the ids are, got {len(texts):,}")
    return None if texts is None else [str(text) for text in texts]
