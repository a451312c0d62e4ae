"""Controls: `sfi` whose slow steps look at the last few queries, at equal reads; of `study.py fidelity --modules`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from sfi_core.engine import by_request, select
from sfi_core.engine.layer import Layer
from sfi_core.policies.base import Policy
from sfi_core.policies.built_in.sfi import SFI

MOST = 64


class LastQueries(SFI):
    """`sfi` by the mean evidence of `window` queries; `query_of` has the last of each request and layer."""

    window: ClassVar[int]

    def __init__(self, *arguments: Any) -> None:
        """Take what `SFI` takes."""
        super().__init__(*arguments)
        self.query_of: dict[tuple[int, int], torch.Tensor] = {}


LAST_QUERIES: dict[str, type[Policy]] = {
    f"fresh-queries-{window}": type("LastQueries", (LastQueries,), {"window": window}) for window in (2, 4, 8, 16, 64)
}


@contextmanager
def queries_kept() -> Iterator[None]:
    """Keep the queries of each step, the prompt's last included, and select by them."""
    attend, refresh = by_request.attend, select.refresh

    def keeping(layer: Layer, query_BHGTD: torch.Tensor) -> torch.Tensor:
        policy, count_B = layer.run.policy, layer.batch_pass.count
        if not isinstance(policy, LastQueries):
            return attend(layer, query_BHGTD)
        T = query_BHGTD.shape[3]
        for row, count in enumerate(count_B):  # a row that has ended has no token
            key, new = (layer.run.requests[row].request, layer.index), query_BHGTD[row : row + 1, :, :, T - count :]
            before = policy.query_of.get(key, new[:, :, :, :0])
            policy.query_of[key] = torch.cat([before, new], 3)[:, :, :, -MOST:].clone()
        return attend(layer, query_BHGTD)

    def refreshing(layers: Any, rows: tuple[int, ...], query_RHGWD: torch.Tensor, seen: Any = None) -> None:
        policy, requests = layers[0].run.policy, layers[0].run.requests
        if not isinstance(policy, LastQueries) or query_RHGWD.shape[3] > 1:  # several at a prompt's end
            refresh(layers, rows, query_RHGWD, seen)
            return
        for layer in layers:
            for row in rows:
                query_1HGWD = policy.query_of[requests[row].request, layer.index][:, :, :, -policy.window :]
                refresh((layer,), (row,), query_1HGWD)

    with patch.object(by_request, "attend", keeping), patch.object(select, "refresh", refreshing):
        yield
