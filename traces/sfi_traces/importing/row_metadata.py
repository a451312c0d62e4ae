"""Reads the metadata of a Parquet file of selections: JSON under our names, beside other writers' keys."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import parquet

from sfi_core.errors import InputError
from sfi_core.machine.text import parse_json
from sfi_traces.importing.arrays import check_ids
from sfi_traces.importing.schema import LARGEST, METADATA, VERSION_NAME, Prompt, check_known
from sfi_traces.schema import MOST_TOKENS

OURS = ("sfi_", "prompt_", "block_size", "trigger_")  # prefixes of our names; `model` is one too
LONGEST = 60  # characters of a value in an error
NUMBER, STRING = f"a whole number in 0 to {LARGEST}", "a string"
NUMBERS, STRINGS = f"whole numbers in 0 to {LARGEST}", "strings"
# by name: a value's type, how deep it may be nested in lists, and both in words
RULES: dict[str, tuple[type, tuple[int, ...], str]] = {
    "model": (str, (0,), STRING),
    "block_size": (int, (0,), NUMBER),
    "prompt_tokens": (int, (0, 1), f"{NUMBER}, or a list of one for each request"),
    "trigger_token_ids": (int, (1,), f"a list of {NUMBERS}"),
    "prompt_token_ids": (int, (1, 2), f"a list of {NUMBERS}, or one for each request"),
    "prompt_token_texts": (str, (1, 2), f"a list of {STRINGS}, or one for each request"),
}


def read_metadata(path: Path, file: parquet.ParquetFile) -> dict[str, Any]:
    """Decode the metadata under our names: whole numbers, strings, or lists of these.

    Raises `InputError` for an unknown name of ours or a value of another type, ValueError where it is no
    JSON.
    """
    known = file.metadata.metadata or {}
    said = {key.decode(errors="replace"): text for key, text in known.items()}
    ours = [name for name in said if name == "model" or name.startswith(OURS)]
    check_known(path, "metadata key", ours, METADATA)
    found = {name: parse_json(said[name]) for name in ours}
    for name, value in found.items():
        if name != VERSION_NAME and value is not None:
            _check(path, name, value)
    return found


def _check(path: Path, name: str, value: Any) -> None:
    kind, depths, words = RULES[name]
    if not any(_is(value, kind, depth) for depth in depths):
        got = json.dumps(value)
        got = got if len(got) <= LONGEST else f"{got[:LONGEST]}..."
        raise InputError(f"{name} of {path} must be {words}, got {got}")


def _is(value: Any, kind: type, depth: int) -> bool:
    if depth:
        return isinstance(value, list) and all(_is(one, kind, depth - 1) for one in value)
    if kind is str:
        return isinstance(value, str)
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def read_prompts(path: Path, said: dict[str, Any]) -> list[Prompt]:
    """Return each request's prompt from `read_metadata`; raises `InputError` if missing or malformed."""
    ids, tokens = said.get("prompt_token_ids"), said.get("prompt_tokens")
    if ids is not None:
        return _of_ids(path, ids, said.get("prompt_token_texts"))
    if tokens is None:
        raise InputError(f"import {path} must have prompt_token_ids or prompt_tokens, got neither")
    counts = tokens if isinstance(tokens, list) else [tokens]
    for count in counts:
        if not 1 <= count <= MOST_TOKENS:
            rule = "at least 1" if count < 1 else f"at most {MOST_TOKENS:,}"
            raise InputError(f"prompt_tokens of {path} must be {rule}, got {count}")
    return [Prompt(tokens=count) for count in counts]


def _of_ids(path: Path, ids: Any, texts: Any) -> list[Prompt]:
    several = bool(ids) and isinstance(ids[0], list)
    prompts, words = (ids, texts) if several else ([ids], [texts])
    if texts is None:
        words = [None] * len(prompts)
    if len(words) != len(prompts):
        raise InputError(f"prompt_token_texts of {path} must be {len(prompts)} lists, got {len(words)}")
    return [_of(path, request, *pair) for request, pair in enumerate(zip(prompts, words, strict=True))]


def _of(path: Path, request: int, ids: Any, texts: Any) -> Prompt:
    what = f"prompt_token_ids of request {request} of {path}"
    array = np.array(ids, np.int64)
    check_ids(array, what)
    if texts is not None and len(texts) != len(ids):
        raise InputError(f"{what} must have {len(ids):,} texts, got {len(texts):,}")
    return Prompt(tokens=len(ids), token_ids=array, texts=texts)
