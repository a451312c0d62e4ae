"""What a run tells its observer of a step and of a recall."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from sfi_core.engine.meter import Meter
from sfi_core.observers.events import RecallEvent, StepEvent
from sfi_core.observers.observer import Observer
from sfi_core.state.kv_store import Recall
from sfi_core.state.request import RequestState


def step_event(
    state: RequestState, batch_step: int, attended: float, seconds: float, **more: Any
) -> StepEvent:
    """Describe the step that a request has finished.

    Args:
        state: The request.
        batch_step: The batch's step.
        attended: Tokens read for each KV head.
        seconds: What the batch's step took.
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


def tell_recall(
    observer: Observer,
    meter: Meter,
    batch_step: int,
    layer: int,
    states: Sequence[RequestState],
    brought: Recall,
) -> None:
    """Count what a layer's selection brings from the host, and tell the observer, once it is there."""
    steps = [(state.request, state.step) for state in states]
    brought.then(partial(_tell, observer, meter, batch_step, layer, steps, brought))


def _tell(
    observer: Observer,
    meter: Meter,
    batch_step: int,
    layer: int,
    steps: Sequence[tuple[int, int]],
    brought: Recall,
) -> None:
    meter.count_recall(batch_step, brought)
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
