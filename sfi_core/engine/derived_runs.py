"""Runs over the memory of another run: one row alone, and the dense twin of a step."""

from dataclasses import replace

from sfi_core.engine.run import Run
from sfi_core.observers.observer import NullObserver
from sfi_core.policies.base import Policy
from sfi_core.state.request import RequestState
from sfi_kernels.compiled import clock
from sfi_kernels.step_descriptor import FAST, SLOW


def open_row(run: Run, row: int, state: RequestState) -> Run:
    """Give the row of an ended request to another one.

    Return a run of the new request alone, over the row's memory, to read its prompt.
    """
    run.left.append(forget(run, row))
    state.tally.queued_seconds = clock() - run.meter.born
    run.requests[row] = state
    only, packed = slice(row, row + 1), run.layers.difference(run.policy.config.dense_layers)
    alone = replace(
        run,
        store=run.store.row(row),
        engine=replace(run.engine, overlap=False, graphs=False),  # one prompt: no step to replay
        attend=None,
        left=[],
        segments={layer: run.segment(layer).row(row) for layer in packed},
        batch_codes={layer: codes.of(only) for layer, codes in run.batch_codes.items()},
        recorded=True,
        _batch_pass=None,
    )
    alone.requests = [state]
    return alone


def forget(run: Run, row: int) -> RequestState:
    """Drop the notes of policy and watchers on a row's request; return the request's state."""
    ended = run.requests[row]
    for key in [key for key in run.notes if key[0] == ended.request]:
        del run.notes[key]
    for watcher in run.watchers:
        watcher.forget(ended.request)
    return ended


def dense_twin(run: Run, count: int | None = None) -> Run:
    """Return a run over the same store in which every request is slow, for the pass under way.

    Its forward pass writes only what the pass under way overwrites. With a `count` every request that takes part
    brings only its first `count` tokens.
    """
    policy = Policy(run.policy.config, run.policy.trigger)
    twin = Run(policy, NullObserver(), run.store, device=run.device)
    twin.requests = [replace(state, slow=True) for state in run.requests]
    twin.segments, twin.layers, twin.step = run.segments, run.layers, run.step
    passes = [replace(request, kind=SLOW) if request.kind == FAST else request for request in run.batch_pass.passes]
    passes = [
        replace(request, count=min(request.count, request.count if count is None else count)) for request in passes
    ]
    twin.describe(passes, run.batch_pass.start)
    return twin
