"""The one interface every decoding policy implements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sfi_core.policies.context import Evidence, LayerContext, Notes
from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_shape import LayerShape
from sfi_core.state.request import RequestState
from sfi_kernels.pseudo_token import PseudoToken


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected memory of one layer, for some requests.

    Attributes:
        index_BHK: Positions in J by KV head, int32, ascending, padded with -1.
        diagnostics: Tensors worth tracing, such as the Selector's `lambda_star`.
        heads_BH: The KV heads whose memory this is, bool; the others keep theirs. None for all.
        pseudo: Of `select_before`: what stands in this step for all that is not read. None for nothing.
    """

    index_BHK: torch.Tensor
    diagnostics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    heads_BH: torch.Tensor | None = None
    pseudo: PseudoToken | None = None


class Rule(Protocol):
    """Says when a slow step is due: `triggers.trigger.Trigger`, for any policy."""

    def reason(self, state: RequestState) -> str:
        """Say why the next step must be slow; empty if it may be fast."""


class Policy:
    """Base of the policies. Override what differs; by default nothing is ever selected.

    Sink and recent tokens are always attended and never reach a policy (Eq. 1). A hook returns the new
    selected memory, or None to keep the one it has (Eq. 3).

    Attributes:
        config: The run's settings; budgets are tokens per KV head.
        trigger: Says when a slow step is due.
        selects_before: Whether `select_before` is to be called on fast steps.
        selects_after: Whether `select_after` is to be called on slow steps.
        prompt_only: Whether `select_after` is for the prompt's end only, not for slow decoding steps.
        selects_next: Whether `select_next` is to be called on fast steps.
        mixes_heads: Whether `dense_heads` is to be called in decoding steps.
        evicts: Whether what is not attended is gone for good; such methods also store less.
        drafts: Whether its fast steps can be taken back, as a lossless run does with rejected tokens.
        offloads: Whether it can run over a store that keeps most keys and values in host memory.
    """

    selects_before = False
    selects_after = False
    prompt_only = False
    selects_next = False
    mixes_heads = False
    evicts = False
    drafts = False
    offloads = False

    def __init__(self, config: SfiConfig, trigger: Rule, layers: Sequence[int] = ()) -> None:
        """Take the settings; `layers`, the model's full-attention ones, are for policies that choose some."""
        self.config = self.adapt(config)
        self.trigger = trigger

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Return the settings the method really runs with."""
        return config

    def plan(self, requests: Sequence[RequestState]) -> list[str]:
        """Say why each request is slow in the step to come, t >= 1; "" for a fast one."""
        return [""] * len(requests)

    @classmethod
    def refreshes(cls) -> bool:
        """Say whether slow decoding steps call `select_after`, in the layers that are not left dense."""
        return cls.selects_after and not cls.prompt_only

    def select_before(self, context: LayerContext) -> Selection | None:
        """Select from the current query, before a fast layer attends (Quest, FreeKV)."""
        return None

    def select_after(self, context: LayerContext) -> Selection | None:
        """Select once a layer has attended (SFI, SnapKV, SyncKV; FreeKV's next step)."""
        return None

    def select_next(self, context: LayerContext) -> Selection | None:
        """Select for the next step, once a fast layer has attended (FreeKV's speculative retrieval)."""
        return None

    def dense_heads(self, state: RequestState, layer: int, heads: int) -> Sequence[int]:
        """Return which of a layer's KV heads read the request's whole history in a decoding step (SyncKV)."""
        return ()

    def rewind(self, note: Notes, length: int) -> None:
        """Forget what the notes of a request and layer hold of positions from `length` on, if it `drafts`."""

    @property
    def most_fast_steps(self) -> int | None:
        """The most fast steps in a row, through which an anchored recent segment grows; None for no limit."""
        return None

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """Return the bytes that the policy keeps of the keys of a layer and request of `capacity` tokens."""
        return 0

    def resident_heads(self, layer: int, heads: int) -> Sequence[int]:
        """Return the KV heads of a layer, of `heads`, that are better never offloaded, if there is room."""
        return range(heads) if layer in self.config.dense_layers else ()

    def selection_tokens(self, state: RequestState) -> float:
        """Return what selecting reads in one fast step, in tokens' worth of keys and values of a KV head."""
        return 0.0


class EvidencePolicy(Policy):
    """A policy whose `select_after` needs the evidence and nothing else of a layer.

    Its selection can run beside the next layers, and inside a CUDA graph. The type of the argument is the
    promise: mypy refuses a look at the rest of a `LayerContext`.
    """

    selects_after = True

    def select_after(self, context: Evidence) -> Selection | None:
        """See `Policy.select_after`."""
        return None
