"""How a run begins, and its forward passes: a piece of the prompts, or a decoding step."""

import time
from typing import Any
from uuid import uuid4

import torch

from sfi_core.engine.run import Run
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.hosts.transformers.checks import prompt_tokens
from sfi_core.models.describe import describe_model
from sfi_core.observers.events import PromptEvent, RunEvent


def run_event(session: Any, batch: int, requests: int) -> RunEvent:
    """Describe a run of so many rows and requests, which begins; the session knows the shapes.

    Every rank must call it: all take the first rank's run id and clock.
    """
    run_id, began_unix_ns = session.ranks.first_ones((uuid4().hex, time.time_ns()))
    return RunEvent(
        batch=batch,
        requests=requests,
        policy=session.policy_name,
        backend=session.backend,
        device=str(session.model.device),
        config=session.policy.config.to_dict(),
        trigger_token_ids=session.trigger_token_ids,
        model=describe_model(session.model, session.shapes()),
        lossless=session.engine.lossless,
        audit=None if session.audit is None else session.audit.to_dict(),
        rank=session.ranks.number,
        ranks=session.ranks.size,
        run_id=run_id,
        began_unix_ns=began_unix_ns,
    )


def reads_prompt(cache: SfiCache, new: int) -> bool:
    """Say whether a pass over `new` padded tokens reads prompts.

    transformers does not say so: one token after the prompt's end is a decoding step.
    """
    return cache.seen == 0 or cache.seen + new <= (cache.prompt_length or new) or new > 1


def begin_prompt(run: Run, cache: SfiCache, ids: torch.Tensor | None, size: torch.Size, mask: Any, checks: Any) -> None:
    """Enter a pass over a piece of the prompts, of `size` requests and padded tokens.

    `ids` are None for embeddings; `mask` is transformers' attention mask, None without padding; `checks` are the
    session's `StateChecks`.
    """
    batch, new = size
    final = cache.seen + new >= (cache.prompt_length or new)
    count = prompt_tokens(mask, batch, new, cache.seen, final=final)
    checks.padding(count)
    if cache.seen and new > 1:
        checks.passes("a prompt in pieces")
    if ids is not None:
        requests = run.requests_of(range(batch))
        run.observer.on(PromptEvent(requests=requests, ids_BT=ids, count=tuple(count)))
    run.begin_prefill(count, final=final)


def begin_decode(run: Run, ids: torch.Tensor) -> None:
    """Enter a decoding step; raise `ConfigError` if CUDA graphs are on, which only sfi's loop has."""
    if not run.recorded:  # transformers' loop does not tell; ours has told already
        run.record(run.ranks.same_tokens(ids[:, -1]))
    if run.engine.graphs:
        raise ConfigError("CUDA graphs must be off in model.generate and loops of one's own; sfi's loop has them")
    run.begin_decode()
