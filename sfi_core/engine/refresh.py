"""The refresh of a layer's selected memory: the policy selects, `packing` packs the selection.

The evidence of a slow request's layers may wait for each other: one call of the Selector then takes each
layer as a row of its batch, with the results of one call a layer. It may wait because the packed segment is
read at the next step only; `Maintenance.join` works off the rest.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import takewhile

import torch

from sfi_core.engine.layer import Layer
from sfi_core.engine.maintenance import first_together
from sfi_core.engine.packing import apply, apply_layers, note_selection
from sfi_core.engine.run import Run
from sfi_core.observers.events import SelectionEvent
from sfi_core.observers.observer import wants, wants_spans
from sfi_core.policies.base import BatchContext, Evidence, EvidencePolicy, LayerContext, Selection
from sfi_kernels.numpy_views import fastest
from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.step_descriptor import NewRows, StepDescriptor


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
    """Let the policy select anew for some requests, by these queries.

    `logits` returns the queries' logits, and `log_sum_RHGW` is their log-sum-exp over J, if the attention has
    computed them.
    """
    run = layer.run
    sink = run.policy.config.sink
    empty = [
        # a selection for the next step may take the token that leaves the recent segment then
        run.requests[row].recent_start == run.requests[row].sink(sink) and not run.policy.selects_next
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


def layer_context(
    layer: Layer, rows: tuple[int, ...], query_RHGWD: torch.Tensor,
    logits: Callable[[], torch.Tensor] | None = None, log_sum_RHGW: torch.Tensor | None = None,
) -> LayerContext:  # fmt: skip
    """Make the context of a layer for some requests; the arguments are those of `refresh`."""
    run, index = layer.run, layer.index
    chosen, states = run.rows(rows), tuple(run.requests[row] for row in rows)
    interval = None
    if layer.backend == "torch" and len(rows) == 1:
        interval = states[0].sink(run.policy.config.sink), states[0].recent_start
    codes = (
        [run.codes(index, query_RHGWD.shape[2]).of(slice(row, row + 1)) for row in rows] if run.policy.chooses else ()
    )
    return LayerContext(
        layer=index, backend=layer.backend, span=partial(run.observer.span, layer=index), ranks=run.ranks,
        wants_diagnostics=wants(run.observer, SelectionEvent), states=states,
        allowed_BT=chosen.allowed_RT, interval=interval, length_B=chosen.length_R if interval is None else None,
        key_norm_BHT=run.store.norms(index, rows, chosen.longest), query_BHGWD=query_RHGWD,
        logits=logits or partial(layer.logits, rows, query_RHGWD), log_sum_BHGW=log_sum_RHGW,
        scale=layer.logit_options["scale"],
        keys=lambda place, start, stop: run.store.keys(index, rows[place], start, stop),
        values=lambda place, start, stop: run.store.values(index, rows[place], start, stop),
        notes=tuple(run.notes[state.request, index] for state in states), codes=tuple(codes),
        whole_on_device=run.store.whole_on_device,
    )  # fmt: skip


def batch_context(layer: Layer, step: StepDescriptor, query_BHG1D: torch.Tensor, *, fast: bool) -> BatchContext:
    """Make the context of a layer for all requests; `fast` as there."""
    run, segment = layer.run, layer.run.segment(layer.index)
    position_BHS, length_BH = segment.position_BHS, segment.length_BH
    if not layer.in_place:  # the segment has the positions of the rows that it holds
        position_BHS, length_BH = torch.empty_like(position_BHS), torch.empty_like(length_BH)
    return BatchContext(
        backend=layer.backend, fast=fast, wants_diagnostics=wants(run.observer, SelectionEvent),
        query_BHGD=query_BHG1D[:, :, :, 0], key_PHND=layer.pages.key_PHND, value_PHNE=layer.pages.value_PHNE,
        block_table_BP=run.store.block_table_BP, descriptor=step,
        codes=run.codes(layer.index, query_BHG1D.shape[2]), position_BHS=position_BHS,
        length_BH=length_BH, scale=layer.logit_options["scale"],
    )  # fmt: skip


def choose(
    layer: Layer, step: StepDescriptor, query_BHG1D: torch.Tensor, *, fast: bool
) -> tuple[Selection | None, PseudoToken | None]:
    """Let the policy choose what the fast requests read; return the choice of all rows.

    Numbers of the host's are not read, so that a CUDA graph can hold the step.
    """
    late = layer.run.late.pop(layer.index, None)
    if late is not None:
        step = replace(step, new=NewRows(*late, layer.pages.value_PHNE, layer.pages.norm_PHN))
    choice = layer.run.policy.choose(batch_context(layer, step, query_BHG1D, fast=fast))
    if choice is None:
        return None, None
    return Selection(choice.index_BHK, choice.diagnostics), choice.pseudo


def choose_and_note(layer: Layer, step: StepDescriptor, query_BHG1D: torch.Tensor) -> PseudoToken | None:
    """Choose as `choose`, after what the policy lacks; note or pack the choice, and tell the observer."""
    run, index = layer.run, layer.index
    with run.observer.span("select_before", index):
        for row in step.fast:
            if run.policy.lacks(run.requests[row], run.notes[run.requests[row].request, index]):
                context = layer_context(layer, (row,), query_BHG1D[row : row + 1])
                run.policy.select_after(context)
        selection, pseudo = choose(layer, step, query_BHG1D, fast=bool(step.fast))
        if selection is not None and not layer.in_place:
            for row in step.fast:
                diagnostics = {name: value[row : row + 1] for name, value in selection.diagnostics.items()}
                apply(layer, (row,), Selection(selection.index_BHK[row : row + 1], diagnostics))
    if selection is not None and layer.in_place:
        note_choice(run, index, selection, step.fast)
    return pseudo


def note_choice(run: Run, layer: int, selection: Selection, rows: tuple[int, ...]) -> None:
    """Note what a layer chose for the fast requests, and tell the observer."""
    pages = run.store.pages(layer)
    backend = fastest(run.store.backend, run.device, pages.key_PHND, pages.value_PHNE)
    run.meter.count(f"{backend}.code_scan", len(rows))
    heard = wants(run.observer, SelectionEvent)
    for row in rows:
        note_selection(run, layer, row, row, selection, heard=heard)


Handed = tuple[Layer, torch.Tensor]  # a layer and its evidence, [1, H, G, 1, T]


def joins(layer: Layer, row: int) -> bool:
    """Say whether a layer's selection for a slow request may wait for those of the next layers.

    It may not if the policy needs more than the evidence, if rows come from the host (the sooner the better),
    if an observer times each layer, or if there is nothing to select from.
    """
    run = layer.run
    policy, state = run.policy, run.requests[row]
    return (
        isinstance(policy, EvidencePolicy)
        and run.store.whole_on_device
        and run.ranks.size == 1
        and state.recent_start > state.sink(policy.config.sink)
        and not wants_spans(run.observer)
    )


def refresh_later(layer: Layer, row: int, logits_1HG1T: torch.Tensor) -> None:
    """Select anew for a request, once enough layers have handed over their evidence, the logits."""
    alike = (row, *logits_1HG1T.shape)
    work = partial(refresh_all, row)
    layer.run.maintenance.collect(alike, (layer, logits_1HG1T), logits_1HG1T.numel(), work)


def refresh_all(row: int, handed: list[Handed]) -> None:
    """Select anew for a request in all layers that have handed over their evidence."""
    layers = [layer for layer, _ in handed]
    run, policy, L = layers[0].run, layers[0].run.policy, len(layers)
    assert isinstance(policy, EvidencePolicy), "`joins` admits no other policy"
    chosen, state = run.rows((row,)), run.requests[row]
    norms = [run.store.norms(layer.index, (row,), chosen.longest) for layer in layers]
    evidence = Evidence(
        layer=layers[0].index, backend=layers[0].backend, allowed_BT=chosen.allowed_RT.expand(L, -1),
        key_norm_BHT=torch.cat(norms), logits=lambda: torch.cat([logits for _, logits in handed]),
        interval=(state.sink(policy.config.sink), state.recent_start),
        wants_diagnostics=wants(run.observer, SelectionEvent),
    )  # fmt: skip
    selection = policy.select_after(evidence)
    if selection is None:
        return
    run.meter.count(f"{layers[0].backend}.selector", L)
    apply_layers(layers, row, selection)
