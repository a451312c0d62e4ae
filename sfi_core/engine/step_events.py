"""The events that an `engine.run.Run` sends its observer: beginning and end of steps, and recalls."""

from collections.abc import Mapping, Sequence
from typing import Any

from sfi_core.observers.events import BeginStepEvent, RecallEvent, StepEvent
from sfi_core.observers.observer import wants
from sfi_core.state.kv_store import Recall
from sfi_core.state.request import RequestState

Shape = Mapping[str, Any]


def step_event(
    state: RequestState, batch_step: int, attended: float, seconds: float, **more: Any
) -> StepEvent:
    """Make the event of the step that a request has finished.

    Args:
        state: The request.
        batch_step: The batch's step.
        attended: Tokens read per KV head.
        seconds: Duration of the batch's step.
        more: Other fields of the event.
    """
    return StepEvent(
        request=state.request,
        step=state.step,
        batch_step=batch_step,
        position=state.length - 1,
        token_id=state.tokens[-1],
        slow=state.slow,
        reason=state.reason,
        steps_since_slow=state.steps_since_slow,
        attended_tokens=attended,
        context_tokens=state.length,
        elapsed_us=seconds * 1e6,
        **more,
    )


def tell_recall(run: Any, layer: int, rows: Sequence[int], brought: Recall) -> None:
    """Count a layer's recall, and tell the observer, once the rows have arrived from the host."""
    states, batch_step, observer = [run.requests[row] for row in rows], run.step, run.observer
    steps = [(state.request, state.step) for state in states]

    def tell() -> None:
        run.meter.count_recall(batch_step, brought)
        for place, (request, step) in enumerate(steps):
            observer.on(
                RecallEvent(
                    request=request,
                    step=step,
                    layer=layer,
                    rows_H=brought.rows_RH[place],
                    row_bytes=brought.row_bytes,
                    waited_us=brought.waited * 1e6 / len(steps),
                )
            )

    brought.then(tell)


def tell_beginning(run: Any) -> None:
    """Tell the observer of an `engine.run.Run` which step its requests have entered."""
    if not wants(run.observer, BeginStepEvent):
        return
    batch_pass = run.batch_pass
    event = BeginStepEvent(
        step=run.step,
        slow=run.requests_of(sorted((*batch_pass.prompts, *batch_pass.slow))),
        fast=run.requests_of(batch_pass.fast),
        reads_prompt=bool(batch_pass.prompts),
        not_replayed=run.meter.not_replayed,
        **_reads(run),
    )
    run.observer.on(event)


def step_shape(run: Any) -> Shape:
    """Return the fields of `StepEvent` that all requests of the pass under way share.

    Call before the requests of the `engine.run.Run` finish their step. Empty if no observer wants the event.
    """
    if not wants(run.observer, StepEvent):
        return {}
    batch_pass = run.batch_pass
    return {
        "graphs": run.meter.replayed,
        "slow_requests": len(batch_pass.prompts) + len(batch_pass.slow),
        "fast_requests": len(batch_pass.fast),
        **_reads(run),
    }


def _reads(run: Any) -> dict[str, int]:
    batch_pass, config = run.batch_pass, run.policy.config
    seen, always, other = run.meter.row_bytes
    if seen != len(run.layers):
        sizes = {layer: run.store.pages(layer).row_bytes for layer in run.layers}
        always = sum(sizes[layer] for layer in run.layers.intersection(config.dense_layers))
        other = sum(sizes.values()) - always
        run.meter.row_bytes = len(run.layers), always, other
    cached, moved = 0, 0.0
    for row in (*batch_pass.prompts, *batch_pass.slow, *batch_pass.fast):
        state = run.requests[row]
        cached += state.length
        if run.policy.mixes_heads and row not in batch_pass.prompts:
            moved += (always + other) * run.attended(state)
        else:
            moved += always * state.length + other * state.read(dense=state.slow)
    return {"cached_tokens": cached, "moved_bytes": round(moved)}
