"""What the core tells the outside world. The core knows no observer but this protocol."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One finished decoding step of one request.

    Attributes:
        request: Index of the request.
        step: Decoding step t; 0 is the prefill's last position.
        position: Position of the query token.
        token_id: The token this step generated, x_t.
        slow: Whether the step ran dense attention, g_t.
        reason: Why it was slow: "first", "trigger", "t_max", ...; empty for a fast step.
        steps_since_slow: Fast steps since the last slow step.
        attended_tokens: Tokens read per KV head, the mean over the full-attention layers.
        context_tokens: Tokens that full attention reads.
        elapsed_us: Wall time of the batch's step, in microseconds.
    """

    request: int
    step: int
    position: int
    token_id: int
    slow: bool
    reason: str
    steps_since_slow: int
    attended_tokens: float
    context_tokens: int
    elapsed_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionEvent:
    """The selected memory of one request and layer was refreshed.

    Attributes:
        request: Index of the request.
        step: Decoding step t.
        layer: Index of the transformer layer.
        index_HK: Selected positions by KV head, int32, padded with -1; on the device.
        diagnostics: The policy's tensors, such as `lambda_star`; on the device.
    """

    request: int
    step: int
    layer: int
    index_HK: torch.Tensor
    diagnostics: Mapping[str, torch.Tensor]


class Observer(Protocol):
    """Receives events and brackets spans; must not change what the core computes."""

    def on_step(self, event: StepEvent) -> None:
        """Record one finished step of one request."""

    def on_selection(self, event: SelectionEvent) -> None:
        """Record one refresh of the selected memory."""

    def span(self, name: str, layer: int | None = None) -> AbstractContextManager[None]:
        """Bracket a region, for NVTX ranges and timings."""


class NullObserver:
    """Observes nothing, at no cost; a base for observers that want some events only."""

    def on_step(self, event: StepEvent) -> None:
        """Drop the event."""

    def on_selection(self, event: SelectionEvent) -> None:
        """Drop the event."""

    def span(self, name: str, layer: int | None = None) -> AbstractContextManager[None]:
        """Bracket nothing."""
        return nullcontext()


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def on_step(self, event: StepEvent) -> None:
        """Forward the event to every observer."""
        for observer in self._observers:
            observer.on_step(event)

    def on_selection(self, event: SelectionEvent) -> None:
        """Forward the event to every observer."""
        for observer in self._observers:
            observer.on_selection(event)

    @contextmanager
    def span(self, name: str, layer: int | None = None) -> Iterator[None]:
        """Nest every observer's span."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.span(name, layer))
            yield
