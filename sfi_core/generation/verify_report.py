"""The report of `verify`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """A generated token that differs from full attention's over the same prefix.

    `index` is its index among the generated tokens, `expected_id` full attention's token. `behind_ulp` is the
    distance of its score to full attention's best, in units in the last place of the logits; infinite for a
    token that a processor forbids.
    """

    index: int
    token_id: int
    expected_id: int
    behind_ulp: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheck:
    """The check of one request with so many generated `tokens`.

    At the indices `near_ties` full attention's two best scores are closer than `VerifyReport.near_ulp`: either token is
    right there, and later tokens depend on the choice. `differing` are the tokens that are not full attention's.
    """

    tokens: int
    near_ties: Sequence[int]
    differing: Sequence[Differing]

    @property
    def first_doubtful(self) -> int | None:
        """The first index that is a near tie or differs, if there is one."""
        return min((*self.near_ties, *(one.index for one in self.differing)), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of `verify`, with `requests` in the order of the prompts.

    Two scores closer than `near_ulp` are a near tie, in units in the last place of logits of `dtype`;
    `bound_ulp` is the distance to full attention's best score that rounding alone explains.
    """

    dtype: str
    near_ulp: float
    bound_ulp: float
    requests: Sequence[RequestCheck]

    @property
    def ok(self) -> bool:
        """Whether every token is full attention's, up to rounding."""
        return all(one.behind_ulp <= self.bound_ulp for request in self.requests for one in request.differing)

    @property
    def tokens(self) -> int:
        """Number of tokens checked."""
        return sum(request.tokens for request in self.requests)

    @property
    def near_ties(self) -> int:
        """Number of near ties."""
        return sum(len(request.near_ties) for request in self.requests)

    @property
    def differing(self) -> int:
        """Number of differing tokens."""
        return sum(len(request.differing) for request in self.requests)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, properties included; an infinite distance becomes None."""
        requests = []
        for request in self.requests:
            row = asdict(request) | {"first_doubtful": request.first_doubtful}
            for one in row["differing"]:
                one["behind_ulp"] = None if one["behind_ulp"] == float("inf") else one["behind_ulp"]
            requests.append(row)
        names = "ok", "tokens", "near_ties", "differing", "dtype", "near_ulp", "bound_ulp"
        return {name: getattr(self, name) for name in names} | {"requests": requests}
