"""The requests to refresh, as tensors on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from sfi_core.state.position_sets import allowed_positions
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import StepDescriptor, sent


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests of the batch whose selected memory is refreshed; tensors are int32 if not said otherwise.

    Attributes:
        requests: Their rows in the batch; empty if only the device knows them.
        request_R: The same; -1 for padding.
        sink_R: Sink tokens.
        length_R: Cached tokens.
        table_RP: Page numbers.
        allowed_RT: Candidate sets J, bool.
        longest: The most cached tokens, T, or a bound on them.
        most_sink: The most sink tokens, or a bound on them.
    """

    requests: tuple[int, ...]
    request_R: torch.Tensor
    sink_R: torch.Tensor
    length_R: torch.Tensor
    table_RP: torch.Tensor
    allowed_RT: torch.Tensor
    longest: int
    most_sink: int
    _head_pages: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def head_pages(self, heads: int) -> torch.Tensor:
        """Return the pages of each of `heads` KV heads, as `KVStore.norms_of` takes them.

        Cached for all layers with as many heads; call on one stream only.
        """
        if heads not in self._head_pages:
            head_H1 = torch.arange(heads, dtype=torch.int32, device=self.table_RP.device)[:, None]
            self._head_pages[heads] = self.table_RP[:, None] * heads + head_H1
        return self._head_pages[heads]

    @classmethod
    def of(
        cls,
        requests: tuple[int, ...],
        states: Sequence[RequestState],
        sink: int,
        step: StepDescriptor,
        table_BP: torch.Tensor,
    ) -> Self:
        """Make the rows of some requests; the descriptor already holds those of all slow ones."""
        chosen = [states[row] for row in requests]
        sinks = [state.sink(sink) for state in chosen]
        longest = max(state.length for state in chosen)
        if requests == step.slow:
            request_R, sink_R, length_R, start_R = step.slow_R
        else:
            lengths, starts = zip(*((s.length, s.recent_start) for s in chosen), strict=True)
            lists = torch.tensor([requests, sinks, lengths, starts], dtype=torch.int32)
            request_R, sink_R, length_R, start_R = sent(lists, table_BP.device)
        return cls(
            requests=requests,
            request_R=request_R,
            sink_R=sink_R,
            length_R=length_R,
            table_RP=table_BP[request_R.long()],
            allowed_RT=allowed_positions(longest, sink_R, start_R),
            longest=longest,
            most_sink=max(sinks),
        )

    @classmethod
    def of_slow(cls, sink: int, step: StepDescriptor, table_BP: torch.Tensor) -> Self:
        """Make the rows of the descriptor's slow requests without host data, for a CUDA graph."""
        request_R, sink_R, length_R, start_R = step.slow_R
        return cls(
            requests=(),
            request_R=request_R,
            sink_R=sink_R,
            length_R=length_R,
            table_RP=table_BP[request_R.clamp_min(0).long()],
            allowed_RT=allowed_positions(step.longest, sink_R, start_R),
            longest=step.longest,
            most_sink=sink,
        )
