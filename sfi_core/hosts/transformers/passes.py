"""A forward pass of transformers as a run sees it: a piece of the prompts, or a decoding step."""

from typing import Any

import torch

from sfi_core.engine.run import Run
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.hosts.transformers.checks import prompt_tokens
from sfi_core.observers.events import PromptEvent


def reads_prompt(cache: SfiCache, new: int) -> bool:
    """Say whether a pass over `new` padded tokens reads prompts.

    transformers does not say so: one token after the prompt's end is a decoding step.
    """
    return cache.seen == 0 or cache.seen + new <= (cache.prompt_length or new) or new > 1


def begin_prompt(
    run: Run, cache: SfiCache, ids: torch.Tensor | None, size: torch.Size, mask: Any
) -> None:
    """Enter a pass over a piece of the prompts, of `size` requests and padded tokens.

    `ids` are None for embeddings; `mask` is transformers' attention mask, None without padding.
    """
    batch, new = size
    final = cache.seen + new >= (cache.prompt_length or new)
    count = prompt_tokens(mask, batch, new, cache.seen, final=final)
    if ids is not None:
        requests = run.requests_of(range(batch))
        run.observer.on(PromptEvent(requests=requests, ids_BT=ids, count=tuple(count)))
    run.begin_prefill(count, final=final)


def begin_decode(run: Run, ids: torch.Tensor) -> None:
    """Enter a decoding step; raise `ConfigError` if CUDA graphs are on, which only sfi's loop has."""
    if not run.recorded:  # transformers' loop does not tell; ours has told already
        run.record(run.ranks.same_tokens(ids[:, -1]))
    if run.engine.graphs:
        raise ConfigError(
            "CUDA graphs must be off in model.generate and loops of one's own; sfi's loop has them"
        )
    run.begin_decode()
