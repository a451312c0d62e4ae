"""`read_prompt(...)`: reads prompts once, for many runs."""

from collections.abc import Callable
from typing import Any

import torch

from sfi_core.engine.loop import left_pad
from sfi_core.engine.prompt_queries import PromptQueries
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.generation.prompts import Prompts, check_prompts, encode
from sfi_core.hosts.transformers.cache import SfiLayer
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.slow_fast import session_on
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DEFAULTS, EngineOptions
from sfi_core.sizes.memory import check_fits
from sfi_kernels.compiled import clock


@torch.no_grad()
def read_prompt(
    model: Any,
    tokenizer: Any,
    prompts: Prompts,
    *,
    capacity: int,
    window: int | None = None,
    engine: EngineOptions = DEFAULTS,
    page_size: int | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> SharedPrompt:
    """Read prompts densely, for `generate(..., shared=...)` to decode from under any policy.

    Arguments and errors are those of `generate`; all keys and values stay on the device. `capacity` are the
    tokens that a request of a run may reach, its prompt included. `window` says how many of each prompt's
    last queries to keep; None keeps all. `engine` and `page_size` must be those of the runs.
    """
    rows = encode(tokenizer, prompts)
    check_prompts(model, rows, capacity - max(map(len, rows), default=0))
    ids_BT, mask_BT = left_pad(rows, model.device)
    B, T = ids_BT.shape
    keeper = PromptQueries(window)
    config = SfiConfig(trigger_policy="never")
    plain, chunk = EngineOptions(backend=engine.backend), engine.prefill_chunk
    with session_on(model, tokenizer, config, policy="full-kv", engine=plain, page_size=page_size) as session:
        check_fits(session.forecast(B, T, capacity, chunk), model.device)
        decoder = Decoder(
            session=session, ids_BT=ids_BT, mask_BT=mask_BT, capacity=capacity, chunk=chunk, watchers=(keeper,),
            on_prefill=on_prefill,
        )  # fmt: skip
        began = clock()
        logits_BV = decoder.prefill()
        seconds = clock() - began
        others = enumerate(decoder.cache.layers)
        return SharedPrompt(
            count=mask_BT.sum(1).tolist(), capacity=capacity, store=session.run.store, layers=keeper.layers,
            others={index: layer for index, layer in others if type(layer) is not SfiLayer},
            logits_BV=logits_BV, ids_BT=ids_BT, window=window, seconds=seconds,
        )  # fmt: skip
