"""What a policy may look at inside a layer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.state.request import RequestState

Notes = dict[str, Any]


def no_span(_: str) -> AbstractContextManager[None]:
    """Bracket nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the Selector needs of one layer, for some requests of the batch.

    Attributes:
        layer: Index of the transformer layer.
        backend: Whose ops to use: `op.on(backend)`.
        allowed_BT: The candidate set J, True where a position may be selected (Eq. 2).
        key_norm_BHT: L2 norms of the cached keys, float32.
        logits: Computes the window's attention logits, [B, H, G, W, T] (Eq. 4). In `select_before` the
            window is the current query.
        log_sum_BHGW: Their log-sum-exp over J, where the attention has made it already.
        interval: J as its first position and one past its last, where the evidence is of one request of the
            torch backend: without other requests no masks are needed.
        span: Brackets a phase of the selection, for the observers.
        wants_diagnostics: Whether an observer looks at a selection's diagnostics.
        ranks: The processes among which the layer's KV heads are split, for what looks across heads.
    """

    layer: int
    backend: str
    allowed_BT: torch.Tensor
    key_norm_BHT: torch.Tensor
    logits: Callable[[], torch.Tensor]
    log_sum_BHGW: torch.Tensor | None = None
    interval: tuple[int, int] | None = None
    span: Callable[[str], AbstractContextManager[None]] = no_span
    wants_diagnostics: bool = True
    ranks: Ranks = ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext(Evidence):
    """What a policy may look at inside one layer, besides the evidence.

    Attributes:
        states: What the run knows of each request, in plain numbers; the torch backend asks for one request
            at a time.
        query_BHGWD: The window's queries.
        scale: Factor on the logits.
        keys: Returns the cached keys of one request, by its place here, from a position to before another,
            [1, H, T, D].
        values: The same for the cached values.
        notes: What the policy keeps in this layer from step to step, by request.
    """

    states: tuple[RequestState, ...]
    query_BHGWD: torch.Tensor
    scale: float
    keys: Callable[[int, int, int], torch.Tensor]
    values: Callable[[int, int, int], torch.Tensor]
    notes: tuple[Notes, ...]
