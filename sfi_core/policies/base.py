"""The one interface every decoding policy implements."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import SparseState
from sfi_core.triggers.trigger import Trigger


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a policy may look at before a step: plain numbers, no tensors, no model."""

    requests: Sequence[SparseState]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How the next step attends; each request of the batch decides alone.

    Attributes:
        slow_B: Dense attention over the whole history, instead of the current support.
        reason_B: Why a request is slow; empty for a fast one.
    """

    slow_B: tuple[bool, ...]
    reason_B: tuple[str, ...]

    @classmethod
    def by_reason(cls, reason_B: Sequence[str]) -> "StepPlan":
        """Make the requests that have a reason slow."""
        return cls(tuple(bool(reason) for reason in reason_B), tuple(reason_B))

    def synchronized(self, running_B: Sequence[bool]) -> "StepPlan":
        """Make every request slow if one that has not ended is."""
        if not any(slow and running for slow, running in zip(self.slow_B, running_B, strict=True)):
            return self
        return StepPlan.by_reason([reason or "batch" for reason in self.reason_B])


def no_span(_: str) -> AbstractContextManager[None]:
    """Bracket nothing."""
    return nullcontext()


Notes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What a policy may look at inside one layer, for some requests of the batch.

    Attributes:
        layer: Index of the transformer layer.
        requests: Their indices; the torch backend asks for one at a time.
        backend: Whose ops to use: `op.on(backend)`.
        allowed_BT: The candidate set J, True where a position may be selected (Eq. 2).
        key_norm_BHT: L2 norms of the cached keys, float32.
        logits: Computes the window's attention logits, [B, H, G, W, T] (Eq. 4). In `select_before` the
            window is the current query.
        log_sum_BHGW: Their log-sum-exp over J, where the attention has made it already.
        span: Brackets a phase of the selection, for the observers.
        heard: Whether anybody looks at a selection's diagnostics.
        states: What the run knows of each of them, in plain numbers.
        query_BHGWD: The window's queries.
        keys: Returns the cached keys of one of them, by its place here, from a position to before another,
            [1, H, T, D].
        attended: Returns, by place, the logits of the current query over what a fast step reads, [H, G, S],
            and the positions, [H, S] (Eq. 1).
        notes: What the policy keeps in this layer from step to step, by request.
        shared: The same for all layers.
        interval: J as its first position and one past its last, where the context is of one request of the
            torch backend: without the others it needs no masks.
        ranks: The processes among which the layer's KV heads are split, for what looks across heads.
    """

    layer: int
    requests: tuple[int, ...]
    backend: str
    allowed_BT: torch.Tensor
    key_norm_BHT: torch.Tensor
    logits: Callable[[], torch.Tensor]
    log_sum_BHGW: torch.Tensor | None = None
    span: Callable[[str], AbstractContextManager[None]] = no_span
    heard: bool = True
    states: tuple[SparseState, ...] = ()
    query_BHGWD: torch.Tensor | None = None
    keys: Callable[[int, int, int], torch.Tensor] | None = None
    attended: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None
    notes: tuple[Notes, ...] = ()
    shared: tuple[Notes, ...] = ()
    interval: tuple[int, int] | None = None
    ranks: Ranks = ALONE


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected memory of one layer and request.

    Attributes:
        index_BHK: Positions in J by KV head, int32, ascending, padded with -1.
        diagnostics: Tensors worth tracing, such as the Selector's `lambda_star`.
    """

    index_BHK: torch.Tensor
    diagnostics: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Policy:
    """Base of the policies. Override what differs; by default nothing is ever selected.

    Sink and recent tokens are always attended and never reach a policy (Eq. 1). A hook returns the new
    selected memory, or None to keep the one it has (Eq. 3).

    Attributes:
        config: The run's settings; budgets are tokens per KV head.
        trigger: Says when a slow step is due.
        selects_before: Whether `select_before` is to be called on fast steps.
        selects_after: Whether `select_after` is to be called on slow steps.
        observes_fast: Whether `observe_fast` is to be called.
        observes_prompt: Whether `observe_prompt` is to be called.
        selects_apart: Whether `select_after` reads the context's logits, their sums, the norms and J, and
            nothing else: it can then run beside the next layers, and inside a CUDA graph.
        evicts: Whether what is not attended is gone for good; such methods also store less.
        signal: What the plan looks at besides tokens, a name of `sfi_core.triggers.signals`; "" for nothing.
    """

    selects_before = False
    selects_after = False
    observes_fast = False
    observes_prompt = False
    selects_apart = False
    evicts = False
    signal = ""

    def __init__(self, config: SfiConfig, trigger: Trigger, layers: Sequence[int] = ()) -> None:
        """Take the settings; `layers`, the model's full-attention ones, are for policies that choose some."""
        self.config = self.adapt(config)
        self.trigger = trigger

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Return the settings the method really runs with."""
        return config

    def plan(self, context: StepContext) -> StepPlan:
        """Decide, before the forward pass of step t >= 1, which requests are slow."""
        raise NotImplementedError

    def selects_in(self, layer: int) -> bool:
        """Say whether a slow step of a layer calls `select_after`."""
        return self.selects_after and layer not in self.config.dense_layers

    def select_before(self, context: LayerContext) -> Selection | None:
        """Select from the current query, before a fast layer attends (Quest, FreeKV)."""
        return None

    def select_after(self, context: LayerContext) -> Selection | None:
        """Select once a layer has attended (SFI, SnapKV, SyncKV; FreeKV's next step)."""
        return None

    def observe_fast(self, context: LayerContext) -> None:
        """Look at the logits of a fast layer's attended set, once it has attended (H2O, TOVA)."""

    def observe_prompt(self, context: LayerContext) -> None:
        """Look at the logits of some queries of the prompt, every one once, in order (H2O)."""

    def selection_tokens(self, state: SparseState) -> float:
        """Return what selecting reads in one fast step, in tokens' worth of keys and values of a KV head."""
        return 0.0
