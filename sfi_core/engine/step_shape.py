"""The shape of a batch's step: how many requests were slow and fast, and what their attention read."""

from collections.abc import Mapping
from typing import Any

from sfi_core.observers.events import BeginStepEvent, StepEvent
from sfi_core.observers.observer import wants

Shape = Mapping[str, Any]


def tell_beginning(run: Any) -> None:
    """Tell an `engine.run.Run`'s observer of the step that its requests have entered."""
    if not wants(run.observer, BeginStepEvent):
        return
    forward = run.forward
    event = BeginStepEvent(
        step=run.step,
        slow=run.requests_of(sorted((*forward.prompts, *forward.slow))),
        fast=run.requests_of(forward.fast),
        reads_prompt=bool(forward.prompts),
        not_replayed=run.meter.not_replayed,
        **_reads(run),
    )
    run.observer.on(event)


def step_shape(run: Any) -> Shape:
    """Return the fields of `StepEvent` that all requests of the pass under way share.

    Args:
        run: The `engine.run.Run`; its requests have not ended their step.

    Returns:
        Nothing where nobody would hear it.
    """
    if not wants(run.observer, StepEvent):
        return {}
    forward = run.forward
    return {
        "graphs": run.meter.replayed,
        "slow_requests": len(forward.prompts) + len(forward.slow),
        "fast_requests": len(forward.fast),
        **_reads(run),
    }


def _reads(run: Any) -> dict[str, int]:
    forward, config = run.forward, run.policy.config
    seen, always, other = run.meter.row_bytes
    if seen != len(run.layers):
        sizes = {layer: run.store.pages(layer).row_bytes for layer in run.layers}
        always = sum(sizes[layer] for layer in run.layers.intersection(config.dense_layers))
        other = sum(sizes.values()) - always
        run.meter.row_bytes = len(run.layers), always, other
    cached, moved = 0, 0.0
    for row in (*forward.prompts, *forward.slow, *forward.fast):
        state = run.requests[row]
        cached += state.length
        if run.policy.mixes_heads and row not in forward.prompts:
            moved += (always + other) * run.attended(state)
        else:
            moved += always * state.length + other * state.read(dense=state.slow)
    return {"cached_tokens": cached, "moved_bytes": round(moved)}
