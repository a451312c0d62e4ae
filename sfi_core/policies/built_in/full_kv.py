"""The baseline: dense attention at every step."""

from collections.abc import Sequence

from sfi_core.policies.base import Policy
from sfi_core.state.request import RequestState


class FullKV(Policy):
    """Every step is slow and nothing is selected."""

    fills = True

    def plan(self, requests: Sequence[RequestState]) -> list[str]:
        """Make every step slow."""
        return ["full-kv"] * len(requests)
