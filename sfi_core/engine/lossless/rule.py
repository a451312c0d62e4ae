"""When a draft is verified, and how long it may grow."""

from collections.abc import Callable
from dataclasses import dataclass

from sfi_core.settings.parts import DraftConfig
from sfi_core.state.request import RequestState

# the fast steps of one verification cost this share of it, by the tokens cached and those a fast step reads
Cost = Callable[[float, float], float]

# what a request is taken to have tested and kept before it has tested anything: a first rejection shortens
# drafts where they hardly pay, and little where they do
TRIED, KEPT = 20.0, 19.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRule:
    """Says of each request whether its next pass drafts one more token or verifies.

    Attributes:
        config: The settings.
        stop_ids: Tokens that end a request.
        cost: What a fast step costs beside a verification, in (0, 1]; None where nobody knows.
        selecting: What a fast step of a request reads besides, to choose; `Policy.selection_tokens`.
    """

    config: DraftConfig
    stop_ids: frozenset[int]
    cost: Cost | None = None
    selecting: Callable[[RequestState], float] = lambda _: 0.0

    def reason(self, state: RequestState, room: int, planned: str) -> str:
        """Say why a request verifies now; empty where it drafts.

        Args:
            state: The request; its last tokens are the draft.
            room: Tokens that it may still generate, the drafted ones included.
            planned: Why its policy's plan makes the next step slow; empty where it does not.
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
        """Return the most tokens that a request drafts before a verification."""
        most = self.config.max_tokens
        if not self.config.adaptive or self.cost is None:
            return most
        tally = state.tally
        rate = (KEPT + tally.accepted) / (TRIED + tally.tested)
        read = state.fast_tokens + self.selecting(state)
        return best_length(rate, self.cost(state.length, read), most)


def best_length(rate: float, cost: float, most: int) -> int:
    """Return how many tokens are best drafted before each verification, 1 to `most`.

    With k drafts, each kept at `rate` if all before it are, a cycle gives (1 - rate^(k + 1)) / (1 - rate)
    tokens, and costs k fast steps and a verification (Leviathan et al., 2023, arXiv:2211.17192, Eq. 1 and
    Theorem 3.8).

    Args:
        rate: Share of the tested tokens that are kept.
        cost: Of a fast step, beside a verification's.
        most: The most.
    """

    def speed(k: int) -> float:
        return sum(rate**i for i in range(k + 1)) / (1 + k * cost)

    return max(range(1, most + 1), key=speed)
