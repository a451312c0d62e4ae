"""Files to import, made up, and what is in them."""

import numpy as np

PROMPT, STEPS, LAYERS, K = 20, 12, 3, 6
STOP = 7  # the trigger's token id


def selection_arrays(**changes) -> dict:
    """Make the arrays of an indexer's file: positions in any order, at first fewer than K in layer 0."""
    rng = np.random.default_rng(0)
    positions = np.stack([[rng.permutation(PROMPT + step)[:K] for _ in range(LAYERS)] for step in range(STEPS)])
    positions[:2, 0, 4:] = -1
    arrays = {
        "sfi_import_version": 1, "positions": positions, "token_ids": np.arange(STEPS) + 1,
        "prompt_token_ids": np.arange(PROMPT) + 30, "trigger_token_ids": np.array([STOP]),
    }  # fmt: skip
    return {name: value for name, value in (arrays | changes).items() if value is not None}


def write_npz(path, **changes):
    np.savez(path, **selection_arrays(**changes))
    return path
