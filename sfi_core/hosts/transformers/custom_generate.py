"""transformers' own way to another decoding: `model.generate(..., custom_generate=sfi_core.custom_generate)`."""

from typing import Any

import torch

from sfi_core.engine.prompt_cache import PromptCache
from sfi_core.hosts.transformers.cache import CACHE_NAME, SfiCache
from sfi_core.hosts.transformers.checks import prompt_tokens, refuse_modes
from sfi_core.hosts.transformers.generate_call import going_on, lossless_decoding
from sfi_core.hosts.transformers.slow_fast import slow_fast
from sfi_core.settings.config import SfiConfig, checked_config
from sfi_core.settings.engine import EngineOptions


def custom_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    trigger_tokenizer: Any = None,
    policy: str | None = None,
    budget: int | None = None,
    config: SfiConfig | None = None,
    engine: EngineOptions | None = None,
    **prepared: Any,
) -> Any:
    """Decode with SFI in a plain call of `model.generate`, which gives what stands before the star.

    `config`, `policy` and `engine` are those of `slow_fast`; `budget` overrides the config's. transformers hands on
    neither `tokenizer` nor `streamer`: `trigger_tokenizer` turns trigger strings into token ids. A cache of sfi in
    `prepared`, the model's other arguments, goes on as in `slow_fast`.

    Raises what `slow_fast` raises, and `ConfigError` for a generation mode that SFI does not run.
    """
    config = checked_config(config)
    config = config if budget is None else config.replace(budget=budget)
    given = prepared.pop(CACHE_NAME, None)
    decoding = logits_processor, stopping_criteria, generation_config
    with slow_fast(model, trigger_tokenizer, config, policy=policy, engine=engine) as session:
        lossless = session.engine.lossless
        refuse_modes(generation_config, {}, lossless=lossless)
        if lossless:
            return lossless_decoding(session, None, PromptCache())(model, input_ids, *decoding, **prepared)
        B, T = input_ids.shape
        cache = given if isinstance(given, SfiCache) else session.cache(generation_config.max_length)
        count = prompt_tokens(prepared.get("attention_mask"), B, T, 0, final=True)
        with going_on(session, cache, input_ids, count, generation_config):
            output = model._sample(input_ids, *decoding, **prepared, **{CACHE_NAME: cache})  # noqa: SLF001
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        session.run.record(session.ranks.same_tokens(sequences[:, -1]))
        return output
