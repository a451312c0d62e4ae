"""What the check of a lossless run has found."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """A generated token that is not the one that full attention has over the same prefix.

    Attributes:
        index: Its number among the generated tokens, from 0.
        token_id: The token.
        expected_id: Full attention's.
        behind_ulp: How far its score is behind full attention's best, in units in the last place of the
            logits; infinite for a token that a processor forbids.
    """

    index: int
    token_id: int
    expected_id: int
    behind_ulp: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheck:
    """The check of one request.

    Attributes:
        tokens: Generated tokens that were checked.
        near_ties: Indices of those at which full attention's two best scores are closer than
            `VerifyReport.near_ulp`; either of the two is right, and what follows depends on which it is.
        differing: Those that are not full attention's.
    """

    tokens: int
    near_ties: Sequence[int]
    differing: Sequence[Differing]

    @property
    def first_doubtful(self) -> int | None:
        """The first index that is a near tie or differs; None for none."""
        return min((*self.near_ties, *(one.index for one in self.differing)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What teacher forcing has found; see `verify`.

    Attributes:
        dtype: Of the logits.
        near_ulp: What counts as a near tie, in units in the last place.
        bound_ulp: How far a token's score may be behind by rounding alone.
        requests: The check of each request, in the prompts' order.
    """

    dtype: str
    near_ulp: float
    bound_ulp: float
    requests: Sequence[RequestCheck]

    @property
    def ok(self) -> bool:
        """Whether every token is full attention's, or behind it by no more than rounding."""
        return all(
            one.behind_ulp <= self.bound_ulp
            for request in self.requests
            for one in request.differing
        )

    @property
    def tokens(self) -> int:
        """Tokens that were checked."""
        return sum(request.tokens for request in self.requests)

    @property
    def near_ties(self) -> int:
        """Near ties of all requests."""
        return sum(len(request.near_ties) for request in self.requests)

    @property
    def differing(self) -> int:
        """Differing tokens of all requests."""
        return sum(len(request.differing) for request in self.requests)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, with what the properties say; an infinite distance is None."""
        requests = []
        for request in self.requests:
            row = asdict(request) | {"first_doubtful": request.first_doubtful}
            for one in row["differing"]:
                one["behind_ulp"] = None if one["behind_ulp"] == float("inf") else one["behind_ulp"]
            row["near_ties"], row["differing"] = list(row["near_ties"]), list(row["differing"])
            requests.append(row)
        return {
            "ok": self.ok,
            "tokens": self.tokens,
            "near_ties": self.near_ties,
            "differing": self.differing,
            "dtype": self.dtype,
            "near_ulp": self.near_ulp,
            "bound_ulp": self.bound_ulp,
            "requests": requests,
        }
