"""When a draft is verified, and how long it may grow."""

from collections.abc import Callable
from dataclasses import dataclass

from sfi_core.settings.parts import DraftConfig
from sfi_core.state.request import RequestState

# the cost of a fast step as a share of a verification's, from the cached tokens and those a fast step reads
Cost = Callable[[float, float], float]

# added to a request's counts of tested and accepted drafts, so that its acceptance rate starts at 0.995
TRIED, KEPT = 20.0, 19.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRule:
    """Decides for each request whether its next pass drafts one more token or verifies.

    Attributes:
        cost: The cost of a fast step relative to a verification, in (0, 1]; None if unknown.
        selecting: Tokens' worth that a fast step reads to select; `Policy.selection_tokens`.
    """

    config: DraftConfig
    stop_ids: frozenset[int]
    cost: Cost | None = None
    selecting: Callable[[RequestState], float] = lambda _: 0.0

    def reason(self, state: RequestState, room: int, planned: str) -> str:
        """Return why a request verifies now, or "" if it drafts.

        Args:
            state: The request; its last tokens are the draft.
            room: Tokens that it may still generate, the drafted ones included.
            planned: The policy's reason for a slow step; "" for a fast one.
        """
        drafted = state.drafted
        if not state.fresh:
            return "rejected"
        if planned:
            return planned
        if drafted + 1 >= room:  # a verification gives one token more than it tests
            return "room"
        if drafted and state.tokens[-1] in self.stop_ids:
            return "stop"
        return "limit" if drafted >= self.limit(state) else ""

    def limit(self, state: RequestState) -> int:
        """Return how many tokens a request drafts at most before a verification."""
        most = self.config.max_tokens
        if not self.config.adaptive or self.cost is None:
            return most
        tally = state.tally
        rate = (KEPT + tally.accepted) / (TRIED + tally.tested)
        read = state.fast_tokens + self.selecting(state)
        return best_length(rate, self.cost(state.length, read), most)


def best_length(rate: float, cost: float, most: int) -> int:
    """Return the draft length, 1 to `most`, with the most tokens per cost.

    k drafts, each accepted at `rate` if all before it are, give (1 - rate^(k + 1)) / (1 - rate) tokens. They
    cost k fast steps, each `cost` of a verification, and one verification (Leviathan et al., 2023,
    arXiv:2211.17192, Eq. 1 and Theorem 3.8).
    """

    def speed(k: int) -> float:
        return sum(rate**i for i in range(k + 1)) / (1 + k * cost)

    return max(range(1, most + 1), key=speed)
