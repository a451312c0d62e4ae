"""The input of a policy in a layer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.state.request import RequestState
from sfi_kernels.code_scan import BatchCodes
from sfi_kernels.step_descriptor import StepDescriptor

Notes = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence of one layer, for some requests of the batch: the Selector's input.

    Attributes:
        layer: Index of the transformer layer.
        backend: The backend of ops: `op.on(backend)`.
        allowed_BT: The candidate set J, True where a position may be selected (Eq. 2).
        key_norm_BHT: L2 norms of the cached keys, float32.
        logits: Computes the window's attention logits, [B, H, G, W, T] (Eq. 4). In `select_before` the
            window is the current query. Clone what is to be kept: the next step overwrites them.
        log_sum_BHGW: Their log-sum-exp over J, if the attention has computed it.
        interval: J as its first position and one past its last, for one request of the torch backend, which
            needs no masks then; None otherwise.
        length_B: Each request's tokens, int32, where logits behind them are undefined; None otherwise.
        span: Opens a span of the selection, for observers.
        wants_diagnostics: Whether an observer wants the selection's diagnostics.
        ranks: The processes among which the layer's KV heads are split.
    """

    layer: int
    backend: str
    allowed_BT: torch.Tensor
    key_norm_BHT: torch.Tensor
    logits: Callable[[], torch.Tensor]
    log_sum_BHGW: torch.Tensor | None = None
    interval: tuple[int, int] | None = None
    length_B: torch.Tensor | None = None
    span: Callable[[str], AbstractContextManager[Any]] = nullcontext
    wants_diagnostics: bool = True
    ranks: Ranks = ALONE

    def probability(self, heads: Sequence[int] | None = None) -> torch.Tensor:
        """Return the softmax of the logits over a request's tokens, of all KV heads or of some."""
        logits_BHGWT = self.logits()
        if heads is not None:  # one by one: a list as an index would wait for the device
            logits_BHGWT = torch.stack([logits_BHGWT[:, head] for head in heads], 1)
        if self.length_B is not None:
            behind_BT = torch.arange(logits_BHGWT.shape[-1], device=self.length_B.device) >= self.length_B[:, None]
            logits_BHGWT = logits_BHGWT.masked_fill(behind_BT[:, None, None, None], -torch.inf)
        return logits_BHGWT.softmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext(Evidence):
    """The evidence, and all else that a policy may use in one layer.

    Attributes:
        states: The requests' states; the torch backend passes one request at a time.
        query_BHGWD: The window's queries.
        scale: Factor on the logits.
        keys: Returns cached keys, [1, H, T, D], given a request's place here, a start and a stop position.
        values: The same for cached values.
        notes: The policy's own data on each request in this layer, kept from step to step.
        codes: The codes of each request's keys, as a batch of one, if the policy chooses for whole batches; else empty.
    """

    states: tuple[RequestState, ...]
    query_BHGWD: torch.Tensor
    scale: float
    keys: Callable[[int, int, int], torch.Tensor]
    values: Callable[[int, int, int], torch.Tensor]
    notes: tuple[Notes, ...]
    codes: tuple[BatchCodes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """One layer of a decoding pass: all rows of the batch, no number of the host's.

    `backend` and `wants_diagnostics` as in `Evidence`; `fast` says whether any request decodes fast; the rest
    are the operands of `code_scan`.
    """

    backend: str
    fast: bool
    wants_diagnostics: bool
    query_BHGD: torch.Tensor
    key_PHND: torch.Tensor
    value_PHNE: torch.Tensor
    block_table_BP: torch.Tensor
    descriptor: StepDescriptor
    codes: BatchCodes
    position_BHS: torch.Tensor
    length_BH: torch.Tensor
    scale: float
