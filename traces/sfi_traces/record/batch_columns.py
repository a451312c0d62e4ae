"""The columns of a step that are its batch's: how it was launched, and what its attention read."""

from typing import Any

from sfi_core.observers.events import StepEvent


def batch_columns(event: StepEvent, copy_gb_per_s: float | None) -> tuple[Any, ...]:
    """Return the last six columns of `steps`, from `graphs` on.

    Args:
        event: The step.
        copy_gb_per_s: What the device copies; None where that was not measured.
    """
    return (
        event.graphs,
        event.slow_requests,
        event.fast_requests,
        event.cached_tokens,
        event.moved_bytes,
        _bandwidth_share(event, copy_gb_per_s),
    )


def _bandwidth_share(event: StepEvent, copied: float | None) -> float | None:
    # not of a prompt, which is read in several passes and mostly computed
    moved = event.moved_bytes
    if copied is None or moved is None or not event.step or not event.elapsed_us:
        return None
    return moved / event.elapsed_us / 1e3 / copied
