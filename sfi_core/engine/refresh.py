"""The refresh of a layer's selected memory: the policy selects, `packing` packs the selection."""

from collections.abc import Callable, Iterator
from itertools import takewhile

import torch

from sfi_core.engine.layer import Layer
from sfi_core.engine.maintenance import first_together
from sfi_core.engine.packing import apply
from sfi_core.engine.policy_view import layer_context
from sfi_core.policies.base import Selection


def end_prompt(layer: Layer, query_BHGTD: torch.Tensor) -> None:
    """Make the first selection of the requests whose prompt ends with the pass.

    `query_BHGTD` are the last piece's queries; the last `window_prefill` of the prompt's select.
    """
    run, ended = layer.run, layer.batch_pass.ended
    if layer.left_dense or not ended:
        return
    last_BHGWD = run.prompt_queries.with_kept(layer, query_BHGTD)
    if not run.policy.selects_after:
        for row in ended:
            apply(layer, (row,), _nothing(last_BHGWD))
        return
    for rows, window in _together(layer, last_BHGWD.shape[1:3].numel()):
        refresh(layer, rows, last_BHGWD[rows[0] : rows[-1] + 1, :, :, -window:])


def _together(layer: Layer, heads: int) -> Iterator[tuple[tuple[int, ...], int]]:
    # yields neighbors whose first selections share their launches, and their number of queries; a prompt
    # shorter than window or budget is alone, since its selection is smaller
    config, waiting = layer.run.policy.config, layer.batch_pass.ended
    least = max(config.window_prefill, config.budget)
    while waiting:
        lengths = [layer.run.requests[row].length for row in waiting]
        count = 1
        if layer.backend == "triton":
            most = first_together(heads * config.window_prefill * max(lengths))
            near = zip(waiting, lengths, range(waiting[0], waiting[0] + most), strict=False)
            alike = takewhile(lambda one: one[0] == one[2] and one[1] >= least, near)
            count = max(1, sum(1 for _ in alike))
        yield waiting[:count], min(config.window_prefill, lengths[0])
        waiting = waiting[count:]


def refresh(
    layer: Layer,
    rows: tuple[int, ...],
    query_RHGWD: torch.Tensor,
    logits: Callable[[], torch.Tensor] | None = None,
    log_sum_RHGW: torch.Tensor | None = None,
) -> None:
    """Let the policy select anew for some requests.

    Args:
        layer: The layer.
        rows: The requests.
        query_RHGWD: The queries that make the selection.
        logits: Returns their logits, if the attention has computed them.
        log_sum_RHGW: The log-sum-exp of the logits over J, likewise.
    """
    run = layer.run
    sink = run.policy.config.sink
    empty = [
        # a selection for the next step may take the token that leaves the recent segment then
        run.requests[row].recent_start == run.requests[row].sink(sink)
        and not run.policy.selects_next
        for row in rows
    ]
    if not any(empty):
        context = layer_context(layer, rows, query_RHGWD, logits, log_sum_RHGW)
        selection = run.policy.select_after(context)
        run.meter.count(f"{layer.backend}.selector", len(rows))
        apply(layer, rows, selection)
        return
    for place, row in enumerate(rows):
        query = query_RHGWD[place : place + 1]
        if empty[place]:  # nothing to select from
            apply(layer, (row,), _nothing(query))
        else:
            refresh(layer, (row,), query)


def select_next(layer: Layer, rows: tuple[int, ...], query_RHG1D: torch.Tensor) -> None:
    """Let the policy select the next step's memory of fast requests, after the layer has attended."""
    with layer.run.observer.span("select_next", layer.index):
        selection = layer.run.policy.select_next(layer_context(layer, rows, query_RHG1D))
        apply(layer, rows, selection, "speculative")


def _nothing(query_BHGWD: torch.Tensor) -> Selection:
    return Selection(query_BHGWD.new_empty(1, query_BHGWD.shape[1], 0, dtype=torch.int32))
