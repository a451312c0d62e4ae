"""Lossless methods: counts of drafted and kept tokens, and differences from full attention's tokens."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from sfi_core.errors import NumericsError
from sfi_core.measure.evaluation.method import LOSSLESS, WHOLE

SAMPLE = ("task", "length", "seed")
EXACT = "float32"  # in a shorter dtype, passes over different numbers of tokens round differently
Row = Mapping[str, Any]


def differences(rows: Iterable[Row]) -> list[tuple[Row, int]]:
    """Compare lossless rows with full attention's on the same samples.

    Returns:
        The rows with another token, each with the index of the first that differs or only one of both gave.
    """
    decoded = [row for row in rows if row.get("token_ids") is not None]
    whole = {_sample(row): row["token_ids"] for row in decoded if row["policy"] == WHOLE}
    return [
        (row, index)
        for row in decoded
        if is_lossless(row) and (expected := whole.get(_sample(row))) is not None
        for index in first_difference(row["token_ids"], expected)
    ]


def check_exact(rows: Iterable[Row], dtype: str) -> None:
    """Raise `NumericsError` if a lossless method in float32 gave other tokens than full attention."""
    differing = differences(rows) if dtype == EXACT else []
    if differing:
        row, index = differing[0]
        more = f"; {len(differing)} samples in all" if len(differing) > 1 else ""
        raise NumericsError(
            f"lossless method {row['method']} at {row['size']} must give full-kv's tokens in {EXACT}, "
            f"got another at index {index} of task {row['task']}, length {row['length']}, "
            f"seed {row['seed']}{more}"
        )


def drafting(rows: Sequence[Row], full: Sequence[Row]) -> dict[str, Any] | None:
    """Sum up the drafts of a lossless method; None for another method.

    Returns:
        Accepted tokens per verification, the kept share of drafted tokens, and forward passes per token after
        the first, each None without data; `compared`, the samples that full attention (`full`) has too, and
        `differing`, those of them with other tokens.
    """
    if not rows or not is_lossless(rows[0]):
        return None
    verified, drafted, accepted = (
        sum(row[name] or 0 for row in rows) for name in ("verifications", "drafted", "accepted")
    )
    decoded = sum(row["generated"] - 1 for row in rows)
    return {
        "accepted_per_verification": accepted / verified if verified else None,
        "kept_share": accepted / drafted if drafted else None,
        "passes_per_token": (drafted + verified) / decoded if decoded else None,
        "compared": len(set(map(_sample, rows)) & set(map(_sample, full))),
        "differing": len(differences([*full, *rows])),
    }


def is_lossless(row: Row) -> bool:
    """Say whether a row is of a lossless method."""
    return bool(row["settings"].get(LOSSLESS))


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """Return the index of the first token that differs, in a list; [] for equal tokens."""
    pairs = enumerate(zip_longest(ours, theirs))
    return [index for index, (our, their) in pairs if our != their][:1]


def _sample(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in SAMPLE)
