"""`model.forward` inside a session on a CPU: decoding steps of `model.generate` and of other loops, compiled."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

from sfi_core.engine.run import Run
from sfi_core.hosts.transformers.cache import CACHE_NAME, under_way
from sfi_core.hosts.transformers.replays import ModelPass, Replays
from sfi_core.hosts.transformers.routing import probing
from sfi_core.hosts.transformers.session import Session

# what a loop hands over that a compiled step has in other ways; anything else goes to the model
HANDLED = {
    "input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", "return_dict",
    CACHE_NAME,
}  # fmt: skip


def forward_with(session: Session, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `model.forward` whose decoding steps are compiled where they can be; `forward` is the model's."""

    @wraps(forward)
    def forward_with_sfi(*args: Any, **kwargs: Any) -> Any:
        cache = under_way.get()
        run = None if cache is None or cache.planned else cache.run
        if probing() or cache is None or run is None or not _may_compile(session):
            return forward(*args, **kwargs)
        if not _is_plain(run, cache.seen, args, kwargs):
            with nullcontext() if cache.replays is None else cache.replays.eager_pass():
                return forward(*args, **kwargs)
        ids_B1 = kwargs["input_ids"]
        if cache.replays is None:
            cache.replays = Replays(session, cache, ModelPass(session, cache, len(ids_B1)), patient=True)
        tokens = sum(not state.finished for state in run.requests)
        with cache.replays.next_step(run, tokens) as replayed:
            if not replayed:
                return forward(*args, **kwargs)
            logits_BV = cache.replays.replay(run, ids_B1.tolist())
        return CausalLMOutputWithPast(logits=logits_BV[:, None], **{CACHE_NAME: cache})

    return forward_with_sfi


def _may_compile(session: Session) -> bool:
    # the layers' shapes are known from the memory check of `model.generate`: a pass of ours within a pass is none
    on_cpu = session.model.device.type == "cpu" and session.backend == "torch"
    return on_cpu and session.audit is None and session.state_checks.known


def _is_plain(run: Run, seen: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # whether the pass is a decoding step of token ids at the requests' own positions, after `seen` padded tokens
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    if args or run.batch_pass.prompts or "input_ids" not in given or given - HANDLED:
        return False
    if kwargs.get("return_dict") is False:
        return False
    positions, batch_pass = kwargs.get("position_ids"), run.batch_pass
    asked = [seen] * len(batch_pass.start)
    if positions is not None:
        asked = positions.expand(len(asked), -1)[:, -1].tolist() if positions.dim() == 2 else []  # noqa: PLR2004
    rows = zip(asked, batch_pass.start, batch_pass.count, strict=False)
    return bool(asked) and all(place == start for place, start, count in rows if count)
