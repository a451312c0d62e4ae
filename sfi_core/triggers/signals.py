"""What a trigger looks at besides tokens: how far the query moved, and how sure the model is.

Both are gathered on the device during a step and read once after it, when the host has waited for the step's
tokens anyway.
"""

from collections.abc import Iterable, Sequence

import torch

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.state.request import RequestState

COSINE, SLOW_COSINE, ENTROPY = "cosine", "slow-cosine", "entropy"


class Signals:
    """One signal of every request of a batch.

    Attributes:
        name: "cosine" (of a step's query with that of the step before), "slow-cosine" (with that of the last
            slow step) or "entropy" (of the next-token distribution).
        ranks: The processes over whose heads it is the mean.
        queries: By layer, the queries to compare with.
    """

    def __init__(self, name: str, ranks: Ranks = ALONE) -> None:
        self.name, self.ranks = name, ranks
        self.queries: dict[int, torch.Tensor] = {}
        self._sum_B: torch.Tensor | None = None
        self._layers = 0

    def see_query(self, layer: int, query_BHGD: torch.Tensor, slow_rows: Iterable[int]) -> None:
        """Compare a layer's query with the one to compare with, and keep it where it is that one now.

        Args:
            layer: Index of the layer.
            query_BHGD: The step's queries; those of finished requests are never looked at.
            slow_rows: Requests whose step is slow.
        """
        if self.name == ENTROPY:
            return
        query, last = query_BHGD.float().clone(), self.queries.get(layer)
        if last is not None:
            cosine_B = torch.cosine_similarity(query, last, -1).flatten(1).mean(1)
            self._sum_B = (
                cosine_B if self._sum_B is None else self._sum_B + cosine_B.to(self._sum_B)
            )
            self._layers += 1
        if self.name == COSINE or last is None:
            self.queries[layer] = query
        else:
            for row in slow_rows:
                last[row] = query[row]

    def see_logits(self, logits_BV: torch.Tensor) -> None:
        """Take the entropy of the step's next-token distributions."""
        if self.name == ENTROPY:
            log_BV = logits_BV.float().log_softmax(-1)
            self._sum_B, self._layers = -(log_BV.exp() * log_BV).nansum(-1), 1

    def seat(self, row: int, other: "Signals") -> None:
        """Let a request that was read alone take a row; both have been settled."""
        for layer, query_BHGD in other.queries.items():
            self.queries[layer][row] = query_BHGD[0]

    def settle(self, requests: Sequence[RequestState]) -> None:
        """Hand the step's signal to the requests: the read of the device."""
        if self._sum_B is None:
            return
        mean_B = self.ranks.mean(self._sum_B / self._layers)
        for state, value in zip(requests, mean_B.tolist(), strict=True):
            if self.name == ENTROPY:
                state.entropy = value
            else:
                state.cosine = value
        self._sum_B, self._layers = None, 0
