"""Files to import, made up, and what is in them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

PROMPT, STEPS, LAYERS, K = 20, 12, 3, 6
STOP = 7  # the trigger's token id


def selection_arrays(**changes: Any) -> dict[str, Any]:
    """Make the arrays of an indexer's file: positions in any order, at first fewer than K in layer 0."""
    rng = np.random.default_rng(0)
    positions = np.stack([[rng.permutation(PROMPT + step)[:K] for _ in range(LAYERS)] for step in range(STEPS)])
    positions[:2, 0, 4:] = -1
    arrays = {
        "sfi_import_version": 1, "positions": positions, "token_ids": np.arange(STEPS) + 1,
        "prompt_token_ids": np.arange(PROMPT) + 30, "trigger_token_ids": np.array([STOP]),
    }  # fmt: skip
    return {name: value for name, value in (arrays | changes).items() if value is not None}


def write_npz(path: Path, **changes: Any) -> Path:
    """Write them."""
    np.savez(path, **selection_arrays(**changes))
    return path


def selection_rows(arrays: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the rows of a Parquet file of the same selections."""
    return [
        {
            "step": step,
            "layer": layer,
            "token_id": int(arrays["token_ids"][step]),
            "positions": [position for position in row.tolist() if position >= 0],
        }
        for step, layers in enumerate(arrays["positions"])
        for layer, row in enumerate(layers)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]], **said: Any) -> Path:
    """Write a Parquet file of rows; `said` goes into its metadata, None leaves out."""
    arrays = selection_arrays()
    given = {
        "sfi_import_version": 1,
        "prompt_token_ids": arrays["prompt_token_ids"].tolist(),
        "trigger_token_ids": arrays["trigger_token_ids"].tolist(),
    } | said
    metadata = {name: json.dumps(value) for name, value in given.items() if value is not None}
    parquet.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), path)
    return path
