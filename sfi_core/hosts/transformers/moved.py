"""Prompts that were read on the device, for a run in two tiers."""

from dataclasses import replace

import torch

from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.state.kv_store import KVStore


def moved(shared: SharedPrompt, store: KVStore) -> SharedPrompt:
    """Return prompts that were read on the device, in an empty store of another kind."""
    batch = len(shared.count)
    begin, count = [0] * batch, [0] * batch
    for layer in shared.layers:
        begin[:] = [0] * batch
        for row, length in enumerate(shared.count):
            for first, key, value in shared.store.blocks(layer, row, length):
                begin[row], count[row] = first, key.shape[2]
                # the other rows have no new tokens: what stands there is padding
                key_BHTD, value_BHTE = (x.expand(batch, -1, -1, -1) for x in (key, value))
                begin_B, count_B = torch.tensor([begin, count], dtype=torch.int32).to(key.device)
                store.append(layer, key_BHTD, value_BHTE, begin_B, count_B, begin, count)
            begin[row], count[row] = length, 0
    return replace(shared, store=store, copied=False)
