"""The events that an `engine.run.Run` sends its observer: beginning and end of steps, and recalls."""

from collections.abc import Sequence
from typing import Any

from sfi_core.engine.ledger import Shape, step_shape
from sfi_core.observers.events import BeginStepEvent, RecallEvent, StepEvent
from sfi_core.observers.observer import wants
from sfi_core.state.kv_store import Recall
from sfi_core.state.request import RequestState


def tell_recall(run: Any, layer: int, rows: Sequence[int], brought: Recall) -> None:
    """Count a layer's recall, and tell the observer, once the rows have arrived from the host."""
    states, batch_step, observer = [run.requests[row] for row in rows], run.step, run.observer
    steps = [(state.request, state.step) for state in states]

    def tell() -> None:
        run.meter.count_recall(batch_step, brought)
        for place, (request, step) in enumerate(steps):
            event = RecallEvent(
                request=request, step=step, layer=layer, rows_H=brought.rows_RH[place],
                row_bytes=brought.row_bytes, waited_us=brought.waited * 1e6 / len(steps),
            )  # fmt: skip
            observer.on(event)

    brought.then(tell)


def tell_beginning(run: Any) -> None:
    """Tell the observer of an `engine.run.Run` which step its requests have entered."""
    if not wants(run.observer, BeginStepEvent):
        return
    batch_pass = run.batch_pass
    shape = _shape(run)
    event = BeginStepEvent(
        step=run.step,
        slow=run.requests_of(sorted((*batch_pass.prompts, *batch_pass.slow))),
        fast=run.requests_of(batch_pass.fast),
        reads_prompt=bool(batch_pass.prompts),
        not_replayed=run.meter.not_replayed,
        cached_tokens=shape["cached_tokens"],
        moved_bytes=shape["moved_bytes"],
    )
    run.observer.on(event)


def shape_of(run: Any) -> Shape:
    """Return the fields of `StepEvent` that all requests of the pass under way share.

    Call before the requests of the `engine.run.Run` finish their step. Empty if no observer wants the event.
    """
    if not wants(run.observer, StepEvent):
        return {}
    return {"graphs": run.meter.replayed, **_shape(run)}


def _shape(run: Any) -> dict[str, Any]:
    batch_pass, policy, meter = run.batch_pass, run.policy, run.meter
    if meter.row_bytes[0] != len(run.layers):
        sizes = {layer: run.store.pages(layer).row_bytes for layer in run.layers}
        dense = sum(sizes[layer] for layer in run.layers.intersection(policy.config.dense_layers))
        meter.row_bytes = len(run.layers), dense, sum(sizes.values()) - dense
    _, always, other = meter.row_bytes

    def moved(state: RequestState) -> float:
        if policy.mixes_heads:
            return float((always + other) * run.reads(state).attended)
        return float(always * state.length + other * state.read(dense=state.slow))

    slow, fast = (
        [run.requests[row] for row in rows] for rows in ((*batch_pass.prompts, *batch_pass.slow), batch_pass.fast)
    )
    return step_shape(slow, fast, moved)
