"""The input of `sfi trace import`: version 1 of the schema; docs/import.md describes it.

Dimensions: N steps from step 0 on, L layers, H heads, U pairs of a layer and a head, K positions of a
selection, B blocks of a selection, P tokens of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sfi_core.errors import InputError
from sfi_core.machine.text import LONGEST, printable, shown
from sfi_traces.overlap import Floats, Ints

VERSION = 1
VERSION_NAME = "sfi_import_version"
LARGEST = 2**31 - 1  # greatest token id of a trace
LAYERS = 2**15  # most layers of a trace
PADDING = -1  # fills up the positions or blocks of shorter selections
# arrays of every file
COMMON = (
    VERSION_NAME, "token_ids", "prompt_token_ids", "prompt_tokens", "token_texts", "prompt_token_texts",
    "trigger_token_ids", "model",
)  # fmt: skip
SELECTIONS = ("positions", "blocks", "block_size", "layers", "mass", "scores")
ATTENTION = ("kv_heads",)  # besides `attention.PASS.LAYER`, or the nested `attentions`
# a Parquet file's columns, and the keys of its metadata, whose values are JSON
COLUMNS = ("request", "step", "layer", "head", "positions", "blocks", "mass", "scores", "token_id", "token_text")
METADATA = (
    VERSION_NAME, "prompt_token_ids", "prompt_tokens", "prompt_token_texts", "block_size",
    "trigger_token_ids", "model",
)  # fmt: skip

Place = tuple[int, int]  # layer, head


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """The caller's choices.

    Attributes:
        top: Keep so many positions of each selection, the most probable; None keeps all of a selection, and
            1,024 of an attention tensor.
        kv_heads: KV heads, for each of which an attention tensor's query heads are averaged; None takes the
            file's number, or else each query head by itself.
    """

    top: int | None = None
    kv_heads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A request's prompt; ids and texts are None where unknown."""

    tokens: int
    token_ids: Ints | None = None
    texts: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Header:
    """What is known of a file before its steps are read.

    Attributes:
        kind: "selections" or "attention".
        place_U: The layers and heads, ascending.
        query_heads: Query heads of a layer; for selections, the heads.
        trigger_token_ids: T_trig; None where the file does not say, as is `model`.
        masses: Whether the positions have their probability under dense attention.
        block_size: Positions of a block; None for positions.
        rows: Steps, or rows of a Parquet file; `ImportedStep.row` counts up to it.
    """

    kind: str
    place_U: list[Place]
    query_heads: int
    prompts: list[Prompt]
    trigger_token_ids: tuple[int, ...] | None
    masses: bool
    block_size: int | None
    model: str | None
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedStep:
    """One step of a request, checked.

    Attributes:
        step: Decoding step t; 0 is the prompt's last position.
        token_id: The generated token, x_t; its text is None where unknown.
        context_tokens: Cached tokens, the query's own included: P + t.
        index_UK: Positions, ascending, padded with -1; int32.
        mass_UK: Their probabilities under dense attention, 0 where padded; None where unknown.
        retained_U: Probability of all that the step attended; None where unknown.
        attended_tokens: Mean tokens read per head.
        row: How far the file has been read; see `Header.rows`.
    """

    request: int
    step: int
    token_id: int
    token_text: str | None
    context_tokens: int
    index_UK: Ints
    mass_UK: Floats | None
    retained_U: Floats | None
    attended_tokens: float
    row: int


def check_version(path: Path, version: object) -> None:
    """Raise `InputError` for a missing or another version."""
    if version is None:
        raise InputError(f"import {path} must have {VERSION_NAME} {VERSION}, got none")
    if str(version) != str(VERSION):
        got = printable(str(version))[:LONGEST]
        raise InputError(
            f"import {path} has {VERSION_NAME} {got}, this sfi reads {VERSION}; upgrade sfi, or write version {VERSION}"
        )


def check_known(path: Path, what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise `InputError` for a name that the schema does not have, such as a misspelt one."""
    for name in names:
        if name not in known:
            raise InputError(f"import {path} has an unknown {what} {shown(name)}; expected some of {known}")
