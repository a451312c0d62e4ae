"""The forward passes of a run: a piece of the prompts, a decoding step, and the dense shadow of an audited step."""

from collections.abc import Mapping
from typing import Any

import torch

from sfi_core.engine.audit import compare_logits
from sfi_core.engine.derived_runs import dense_twin
from sfi_core.engine.run import Run
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.hosts.transformers.checks import prompt_tokens
from sfi_core.hosts.transformers.shapes import StateChecks
from sfi_core.observers.events import LogitsEvent, PromptEvent


def reads_prompt(cache: SfiCache, new: int) -> bool:
    """Say whether a pass over `new` padded tokens reads prompts: a token after the prompt's end is a decoding step."""
    return cache.seen == 0 or cache.seen + new <= (cache.prompt_length or new) or new > 1


def begin_prompt(
    run: Run, cache: SfiCache, ids: torch.Tensor | None, size: torch.Size, mask: Any, checks: StateChecks
) -> None:
    """Enter a pass over a piece of the prompts, of `size` requests and padded tokens; `ids` are None for embeddings."""
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


def shadow(model: Any, cache: SfiCache, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run an audited step densely, then undo its changes to the cache, but for keys that the step rewrites."""
    run = cache.run
    assert run is not None, "a run has begun"
    held = cache.taken()
    cache.shadowed = True
    cache.attach(dense_twin(run))
    try:
        with run.observer.span("shadow"):
            cache.dense_BV = model(*args, **kwargs).logits[:, -1]
    finally:
        cache.shadowed = False
        cache.put_back(held)
        cache.attach(run)


def compare_shadow(run: Run, cache: SfiCache, logits_BV: torch.Tensor) -> None:
    """Tell the observer how far the step's distributions are from its shadow's, if there is one."""
    if cache.dense_BV is None:
        return
    dense_BV, cache.dense_BV = cache.dense_BV, None
    rows = audited_rows(run)
    chosen = torch.tensor(rows, device=logits_BV.device)
    compared = compare_logits(logits_BV[chosen], dense_BV[chosen])
    steps = tuple(run.requests[row].step for row in rows)
    run.observer.on(LogitsEvent(requests=run.requests_of(rows), steps=steps, **compared))


def audited_rows(run: Run) -> tuple[int, ...]:
    """Return the rows of the audited requests whose step reads sparsely."""
    audit, states = run.audit, run.requests
    if audit is None:
        return ()
    sparse = run.batch_pass.fast
    if run.policy.mixes_heads:  # some heads of a slow step read sparsely
        sparse = tuple(sorted((*sparse, *run.batch_pass.slow)))
    return tuple(row for row in sparse if audit.due(states[row].step, slow=states[row].slow))
