"""Some requests of a batch as the refresh of a layer needs them, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from sfi_core.state.position_sets import allowed_positions
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import StepDescriptor, sent


@dataclass(frozen=True, slots=True)
class Rows:
    """Some requests of the batch whose selected memory is refreshed, on the cache's device.

    Attributes:
        requests: Their rows in the batch; empty where only the device knows them.
        request_R: The same, int32; -1 for a row of no request.
        sink_R: Their sink tokens, int32.
        length_R: Their cached tokens, int32.
        table_RP: Their page numbers, int32.
        allowed_RT: Their candidate sets J.
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
        """Return the requests' pages of each of `heads` KV heads, as `KVStore.norms_of` takes them.

        Made once for all layers of as many heads; all who ask are on one stream.
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
        """Gather the rows of some requests; those of the slow ones lie in the descriptor already."""
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
        """Gather the rows of the slow requests' lists, however many requests these hold.

        Asks the host for nothing but bounds, so that a CUDA graph may hold it.
        """
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
