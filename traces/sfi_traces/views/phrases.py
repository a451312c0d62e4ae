"""Words that the screen, the report and the figures share; imports nothing heavy."""

from collections.abc import Mapping
from typing import Any


def span(first: int, last: int) -> str:
    """Name a bin of integers: "1", "3-4"."""
    return f"{first}" if first == last else f"{first}-{last}"


def dense_words(row: Mapping[str, Any]) -> str:
    """Say what dense attention's most probable token is, from a row of the table `logits`."""
    text, probability = row["dense_token_text"], row["dense_probability"]
    token = "another token" if text is None else repr(text)
    return token if probability is None else f"{token} ({probability:.0%})"
