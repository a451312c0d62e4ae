"""The selected memory of a layer: evidence, choice, pack.

The device half (`select`, `pack`, `choose`) has tensors and no number of the host's that changes by step: CUDA graphs
capture it. The host half (`note`) updates requests and counts, and tells the observer. Both take one layer or several,
whose requests then follow each other in the batch dimension of evidence and selection.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from sfi_core.engine.batch_pass import Rows
from sfi_core.engine.layer import Layer
from sfi_core.engine.run import Run
from sfi_core.observers.events import SelectionEvent
from sfi_core.observers.observer import SPANS
from sfi_core.policies.base import BatchContext, Evidence, EvidencePolicy, LayerContext, Selection
from sfi_core.state.kv_store import Recall
from sfi_kernels.compiled import fastest
from sfi_kernels.dense_attention import window_logits
from sfi_kernels.pack import pack_layers
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.step_descriptor import NewRows, StepDescriptor

# the logits of some queries, and their log-sum-exp over J, if the attention has computed it
PREDICTED = "predicted"  # the reason of a choice by a predicted query
Seen = tuple[Callable[[], torch.Tensor], torch.Tensor | None]


class Handed(NamedTuple):
    """The evidence of a layer: logits, [R, H, G, 1, T], and their log-sum-exp over J if the attention has it."""

    layer: Layer
    logits_BHGWT: torch.Tensor
    log_sum_BHGW: torch.Tensor | None = None


def select(
    layers: Sequence[Layer], rows: Rows, query_RHGWD: torch.Tensor | None, seen: Seen | None
) -> Selection | None:
    """Let the policy select from what some layers have seen: with `pack` the device half.

    An `EvidencePolicy` that sees needs no `query_RHGWD`; other policies compute the logits that they need.
    """
    policy = layers[0].run.policy
    if isinstance(policy, EvidencePolicy) and seen is not None:
        return policy.select_after(Evidence(**_evidence(layers, rows, seen)))
    assert query_RHGWD is not None, "only evidence goes without queries"
    return policy.select_after(layer_context(layers[0], rows.requests, query_RHGWD, seen))


def pack(layers: Sequence[Layer], rows: Rows, selection: Selection) -> Recall | None:
    """Pack a selection into the layers' segments, but where attention reads in place: there each step chooses first.

    Return a recall from the host, if there is any.
    """
    layer, run = layers[0], layers[0].run
    if selection.recall is not None or layer.in_place:
        return selection.recall
    with run.observer.span("pack", layer.index):
        if len(layers) > 1 and layer.backend == "torch":
            pages = [(each.pages.key_PHND, each.pages.value_PHNE, *run.segment(each.index).tensors) for each in layers]
            pack_layers(pages, run.store.block_table_BP, rows.requests[0], selection.index_BHK, rows.sink_R)
            return None
        recall = None
        for each, index_RHK in zip(layers, selection.index_BHK.chunk(len(layers)), strict=True):
            recall = run.store.pack_into(
                run.segment(each.index), each.index, rows.request_R, rows.sink_R, index_RHK, rows.most_sink,
                selection.heads_BH,
            )  # fmt: skip
        return recall


def choose(
    layer: Layer, step: StepDescriptor, query_BHG1D: torch.Tensor, longest: int, table_BP: torch.Tensor | None = None
) -> tuple[list[Selection], PseudoToken | None]:
    """Let the policy choose what the fast requests read; return what it chose for all rows: the device half.

    `longest` bounds the requests' tokens. Rows that are not the run's have a block table of their own. A choice for the
    next step comes second. What was chosen early is joined.
    """
    batch, early = _batch(layer, step, query_BHG1D, longest, table_BP), layer.run.early.pop(layer.index, None)
    if early is None:
        return _choose(layer, batch)
    layer.run.side.wait(layer.index)
    layer.run.policy.companion.follow(batch, early.pseudo)
    early.job = None  # which refers to it
    return early.selections, early.pseudo


@dataclass(slots=True)
class Early:
    """A choice that `job` makes early; the job holds what it reads, until the layer joins it."""

    job: Callable[[], None] | None = None
    selections: list[Selection] = field(default_factory=list)
    pseudo: PseudoToken | None = None


def choose_early(layer: Layer, step: StepDescriptor, rows: Rows | None, query: Callable[[], torch.Tensor]) -> None:
    """Choose as `choose`, which waits for it then, by a predicted `query`, [B, H, G, 1, D], beside what comes between.

    The query is computed beside it, too, and where segments have rows of their own, those of `rows` are packed.
    """
    run, early = layer.run, Early()

    def job() -> None:
        with run.launches():
            batch = _batch(layer, step, query(), layer.batch_pass.longest, early=True)
            (chosen,), early.pseudo = _choose(layer, batch)
            recall = None
            if rows is not None:
                recall = pack((layer,), rows, chosen.of([*rows.requests]) if rows.requests else chosen)
        early.selections = [replace(chosen, reason=PREDICTED, recall=recall)]

    early.job, run.early[layer.index] = job, early
    run.side.run(layer.index, job)


def _batch(
    layer: Layer, step: StepDescriptor, query_BHG1D: torch.Tensor, longest: int,
    table_BP: torch.Tensor | None = None, *, early: bool = False,
) -> BatchContext:  # fmt: skip
    run, segment = layer.run, layer.run.segment(layer.index)
    late = None if early else run.late.pop(layer.index, None)
    if late is not None:
        step = replace(step, new=NewRows(*late, layer.pages.value_PHNE, layer.pages.norm_PHN))
    position_BHS, length_BH = segment.position_BHS, segment.length_BH
    if not layer.in_place:  # the segment has the positions of the rows that it holds
        position_BHS, length_BH = torch.empty_like(position_BHS), torch.empty_like(length_BH)
    near = layer.near
    return BatchContext(
        backend=layer.backend, fast=bool(step.fast), wants_diagnostics=SelectionEvent in run.observer.wants,
        query_BHGD=query_BHG1D[:, :, :, 0], key_PHND=near.key_PHND, value_PHNE=near.value_PHNE,
        block_table_BP=near.block_table_BP if table_BP is None else table_BP, descriptor=step,
        position_BHS=position_BHS, length_BH=length_BH, scale=layer.logit_options["scale"],
        evidence=partial(_evidence_of_all, layer, step, query_BHG1D, longest, table_BP),
        kept=run.keep(layer.index, query_BHG1D.shape[2]), early=early,
    )  # fmt: skip


def _choose(layer: Layer, batch: BatchContext) -> tuple[list[Selection], PseudoToken | None]:
    choice = layer.run.policy.companion.choose(batch)
    if choice is None:
        return [], None
    if choice.ahead_BHK is None:
        return [Selection(choice.index_BHK, choice.diagnostics)], choice.pseudo
    corrected = Selection(choice.index_BHK, choice.diagnostics, choice.corrected_BH, reason="correction")
    return [corrected, Selection(choice.ahead_BHK, reason="speculative")], choice.pseudo


def _evidence_of_all(
    layer: Layer, step: StepDescriptor, query_BHG1D: torch.Tensor, longest: int, table_BP: torch.Tensor | None
) -> Evidence:
    table_BP = layer.run.store.block_table_BP if table_BP is None else table_BP
    rows = Rows.of_all(layer.run.policy.config.sink, step, table_BP, longest)

    def logits() -> torch.Tensor:
        pages = layer.pages.key_PHND, rows.table_RP, rows.length_R
        return window_logits.on(layer.backend)(query_BHG1D, *pages, **layer.logit_options, longest=longest)

    return Evidence(**_evidence((layer,), rows, (logits, None)))


def note(run: Run, layers: Sequence[int], places: Mapping[int, int], selection: Selection) -> None:
    """Note what some layers selected for the requests in some rows, and tell the observer: the host half.

    `places` has by row of the batch the request's place among those of a layer in the selection. A "speculative" one is
    for the next step.
    """
    heard, sink = SelectionEvent in run.observer.wants, run.policy.config.sink
    count, selected = len(selection.index_BHK) // len(layers), selection.index_BHK.shape[2]
    if selection.reason == PREDICTED:
        run.meter.count("choice.early", len(layers) * len(places))
    for number, layer in enumerate(layers):
        for row, place in places.items():
            state, at = run.requests[row], number * count + place
            state.note_packed(sink, selected, ahead=selection.reason == "speculative")
            if not heard:  # making an event takes ten times as long as the note
                continue
            event = SelectionEvent(
                request=state.request, step=state.step, layer=layer, index_HK=selection.index_BHK[at],
                diagnostics={name: value[at : at + 1] for name, value in selection.diagnostics.items()},
                reason=selection.reason, heads_H=None if selection.heads_BH is None else selection.heads_BH[at],
            )  # fmt: skip
            run.observer.on(event)


def note_choice(run: Run, layer: int, selections: Sequence[Selection], rows: tuple[int, ...]) -> None:
    """Note what a layer chose for the fast requests among all rows."""
    pages = run.store.pages(layer)
    backend = fastest(run.store.backend, run.device, pages.key_PHND, pages.value_PHNE)
    if not run.in_place:
        run.meter.count(f"{backend}.pack", len(rows) * len(selections))
    elif run.policy.coded:
        run.meter.count(f"{backend}.code_scan", len(rows))
    for selection in selections:
        note(run, (layer,), {row: row for row in rows}, selection)


def refresh(
    layers: Sequence[Layer], rows: tuple[int, ...], query_RHGWD: torch.Tensor, seen: Seen | None = None
) -> None:
    """Select anew for some requests; the other arguments are those of `select`."""
    run, layer = layers[0].run, layers[0]
    places = [place for place, row in enumerate(rows) if has_candidates(run, row)]
    if len(places) < len(rows):
        for place, row in enumerate(rows):
            if place not in places:
                put(layers, (row,), nothing(query_RHGWD))
        if not places:
            return
        rows, query_RHGWD = tuple(rows[place] for place in places), query_RHGWD[places]
        if seen is not None:
            logits, log_sum_RHGW = seen
            seen = (lambda: logits()[places]), None if log_sum_RHGW is None else log_sum_RHGW[places]
    selection = select(layers, run.rows(rows), query_RHGWD, seen)
    by = layer.backend if selection is None or selection.by is None else selection.by
    run.meter.count(f"{by}.selector", len(layers) * len(rows))
    put(layers, rows, selection)


def put(layers: Sequence[Layer], rows: tuple[int, ...], selection: Selection | None) -> None:
    """Pack and note the layers' selection for some requests; None keeps the memory as it is."""
    if selection is None:
        return
    layer, run = layers[0], layers[0].run
    recall, places = pack(layers, run.rows(rows), selection), {row: place for place, row in enumerate(rows)}
    if recall is not None:
        run.tell_recall((layer.index,), places, recall)
    if not layer.in_place:
        run.meter.count(f"{layer.backend}.pack", len(layers) * len(rows))
    note(run, [each.index for each in layers], places, selection)


def has_candidates(run: Run, row: int) -> bool:
    """Say whether a request has positions to select from, in this step or, where the policy selects ahead, the next."""
    state = run.requests[row]
    return run.policy.ahead or state.recent_start > state.sink(run.policy.config.sink)


def hand_over(layer: Layer, rows: tuple[int, ...], query_RHG1D: torch.Tensor, handed: Handed) -> None:
    """Select anew for slow requests from a layer's evidence: now, beside the next layers, or with those of others."""
    run = layer.run
    if run.policy.mixes_heads and not layer.left_dense:
        layer.later.append(partial(refresh_handed, rows, query_RHG1D, [handed]))
    else:
        submit(handed, partial(refresh_handed, rows, query_RHG1D), rows)


def submit(handed: Handed, work: Callable[[list[Handed]], None], rows: tuple[int, ...]) -> None:
    """Give a layer's evidence to the run's maintenance, where it may wait for that of the next layers."""
    run, logits_BHGWT = handed.layer.run, handed.logits_BHGWT
    waits = isinstance(run.policy, EvidencePolicy) and run.store.whole_on_device and run.ranks.size == 1
    waits = waits and not run.policy.mixes_heads  # whose heads differ by layer
    # spans time each layer
    waits = waits and SPANS not in run.observer.wants and all(has_candidates(run, row) for row in rows)
    alike = (rows, *logits_BHGWT.shape) if waits else None
    run.maintenance.submit(handed, work, alike=alike, numbers=logits_BHGWT.numel())


def refresh_handed(rows: tuple[int, ...], query_RHG1D: torch.Tensor, handed: list[Handed]) -> None:
    """Select anew for some requests in all layers that have handed over their evidence."""
    layers = [each.layer for each in handed]
    with layers[0].run.launches():
        refresh(layers, rows, query_RHG1D, joined(handed))


def joined(handed: Sequence[Handed]) -> Seen:
    """Return the evidence of several layers as one batch."""
    if len(handed) == 1:
        return lambda: handed[0].logits_BHGWT, handed[0].log_sum_BHGW
    sums = [each.log_sum_BHGW for each in handed if each.log_sum_BHGW is not None]
    return lambda: torch.cat([each.logits_BHGWT for each in handed]), torch.cat(sums) if sums else None


def choose_and_note(layer: Layer, step: StepDescriptor, query_BHG1D: torch.Tensor) -> PseudoToken | None:
    """Choose as `choose`; note or pack what was chosen, for the next step once the layer has attended."""
    run, index = layer.run, layer.index
    with run.observer.span("select_before", index):
        selections, pseudo = choose(layer, step, query_BHG1D, layer.batch_pass.longest)
        if layer.in_place:
            if selections:
                note_choice(run, index, selections, step.fast)
            return pseudo
        for selection in selections:
            work = partial(put, (layer,), step.fast, selection.of([*step.fast]))
            if selection.reason == "speculative":
                layer.later.append(work)
            else:
                work()
    return pseudo


def end_prompt(layer: Layer, query_BHGTD: torch.Tensor) -> None:
    """Make the first selection of the prompts that end with the pass, by the last `window_prefill` queries."""
    run, ended = layer.run, layer.batch_pass.ended
    if layer.left_dense or not ended:
        return
    run.keep(layer.index, query_BHGTD.shape[2])
    last_BHGWD = run.prompt_queries.with_kept(layer, query_BHGTD)
    for row in ended:
        if run.policy.selects_after:
            window = min(run.policy.config.window_prefill, run.requests[row].length)
            refresh((layer,), (row,), last_BHGWD[row : row + 1, :, :, -window:])
        else:
            put((layer,), (row,), nothing(last_BHGWD))


def nothing(query_BHGWD: torch.Tensor) -> Selection:
    """Return a selection of no positions for one request."""
    return Selection(query_BHGWD.new_empty(1, query_BHGWD.shape[1], 0, dtype=torch.int32))


def layer_context(
    layer: Layer, rows: tuple[int, ...], query_RHGWD: torch.Tensor, seen: Seen | None = None
) -> LayerContext:
    """Make the context of a layer for some requests; the arguments are those of `select`."""
    run, index = layer.run, layer.index
    all_kept = run.keep(index, query_RHGWD.shape[2])
    kept = () if all_kept is None else tuple(all_kept.of(slice(row, row + 1)) for row in rows)
    states = tuple(run.requests[row] for row in rows)
    return LayerContext(
        **_evidence((layer,), run.rows(rows), seen or (partial(layer.logits, rows, query_RHGWD), None)),
        states=states, query_BHGWD=query_RHGWD, scale=layer.logit_options["scale"],
        keys=lambda place, start, stop: run.store.keys(index, rows[place], start, stop),
        values=lambda place, start, stop: run.store.values(index, rows[place], start, stop),
        notes=tuple(run.notes[state.request, index] for state in states), kept=kept,
        whole_on_device=layer.ring is None,
    )  # fmt: skip


def _evidence(layers: Sequence[Layer], rows: Rows, seen: Seen) -> dict[str, Any]:
    # the fields of `Evidence`, for the requests in `rows`, of the first layer, then of the next
    layer, run, several = layers[0], layers[0].run, len(layers) > 1
    pages = [rows.head_pages(each.pages.key_PHND.shape[1], run.store.page_size) for each in layers]
    norms = [
        run.store.norms(each.index, page_RHP)[:, :, : rows.longest]
        for each, page_RHP in zip(layers, pages, strict=True)
    ]
    fields: dict[str, Any] = {
        "layer": layer.index,
        "backend": layer.backend,
        "span": partial(run.observer.span, layer=layer.index),
        "ranks": run.ranks,
        "wants_diagnostics": SelectionEvent in run.observer.wants,
        "allowed_BT": rows.allowed_RT.repeat(len(layers), 1) if several else rows.allowed_RT,
        "key_norm_BHT": torch.cat(norms) if several else norms[0],
        "logits": seen[0],
        "log_sum_BHGW": seen[1],
        "request_B": rows.request_R,
        "all_kept": run.kept.get(layer.index),
    }
    if layer.backend == "torch" and len(rows.requests) == 1:
        state = run.requests[rows.requests[0]]
        return fields | {"interval": (state.sink(run.policy.config.sink), state.recent_start)}
    return fields | {"length_B": rows.length_R.repeat(len(layers)) if several else rows.length_R}
