"""Reads the prompts from a Parquet file's metadata, of one request or a list by request."""

from pathlib import Path
from typing import Any

import numpy as np

from sfi_core.errors import InputError
from sfi_traces.importing.schema import Prompt
from sfi_traces.importing.tokens import check_ids


def read_prompts(path: Path, said: dict[str, Any]) -> list[Prompt]:
    """Return the prompt of each request; `said` is what `read_metadata` returned.

    Raises:
        InputError: The prompts are missing or malformed.
    """
    ids, tokens = said.get("prompt_token_ids"), said.get("prompt_tokens")
    if ids is not None:
        return _of_ids(path, ids, said.get("prompt_token_texts"))
    if tokens is None:
        raise InputError(f"import {path} must have prompt_token_ids or prompt_tokens, got neither")
    counts = tokens if isinstance(tokens, list) else [tokens]
    for count in counts:
        if count < 1:
            raise InputError(f"prompt_tokens of {path} must be at least 1, got {count}")
    return [Prompt(tokens=count) for count in counts]


def _of_ids(path: Path, ids: Any, texts: Any) -> list[Prompt]:
    several = bool(ids) and isinstance(ids[0], list)
    prompts, words = (ids, texts) if several else ([ids], [texts])
    if texts is None:
        words = [None] * len(prompts)
    if len(words) != len(prompts):
        raise InputError(
            f"prompt_token_texts of {path} must be {len(prompts)} lists, got {len(words)}"
        )
    return [
        _of(path, request, *pair) for request, pair in enumerate(zip(prompts, words, strict=True))
    ]


def _of(path: Path, request: int, ids: Any, texts: Any) -> Prompt:
    what = f"prompt_token_ids of request {request} of {path}"
    array = np.array(ids, np.int64)
    check_ids(array, what)
    if texts is not None and len(texts) != len(ids):
        raise InputError(f"{what} must have {len(ids):,} texts, got {len(texts):,}")
    return Prompt(tokens=len(ids), token_ids=array, texts=texts)
