"""One call of the Selector for several layers of a slow request, each a row of the Selector's batch.

The results are those of one call per layer. The evidence of a layer may wait, since its packed segment is
read at the next step only; `Session.after_forward` works off the rest.
"""

from functools import partial

import torch

from sfi_core.engine.layer import Layer
from sfi_core.engine.packing import apply_layers
from sfi_core.observers.events import SelectionEvent
from sfi_core.observers.observer import wants, wants_spans
from sfi_core.policies.base import EvidencePolicy
from sfi_core.policies.context import Evidence

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
    selection = policy.select_after(
        Evidence(
            layer=layers[0].index,
            backend=layers[0].backend,
            allowed_BT=chosen.allowed_RT.expand(L, -1),
            key_norm_BHT=torch.cat(norms),
            logits=lambda: torch.cat([logits for _, logits in handed]),
            interval=(state.sink(policy.config.sink), state.recent_start),
            wants_diagnostics=wants(run.observer, SelectionEvent),
        )
    )
    if selection is None:
        return
    run.meter.count(f"{layers[0].backend}.selector", L)
    apply_layers(layers, row, selection)
