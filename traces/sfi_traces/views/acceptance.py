"""How many drafted tokens a lossless run kept: by place in the sentence, by depth in the draft."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from sfi_core.errors import TraceError
from sfi_traces.summary.lossless import lossless_facts
from sfi_traces.summary.scope import Scope
from sfi_traces.views.captions import Caption
from sfi_traces.views.view import View

AXES = {  # what stands below the bars of each side
    "places": "place in the sentence; 0 is its first token",
    "depths": "depth in the draft; 1 is its first token",
}


class Bar(NamedTuple):
    """A share.

    Attributes:
        name: The places or depths that it is of: "0", "1", "2", "3-4", ...
        share: Of the tested tokens, those that were kept.
        tested: How many were tested.
    """

    name: str
    share: float
    tested: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the verifications of a request kept.

    Attributes:
        sides: The bars of each of `AXES`.
        overall: Share of the tested tokens that were kept.
        tested: How many were tested.
        verifications: How many verifications there were.
        tokens_per_verification: Tokens that one gave, the mean.
    """

    sides: dict[str, list[Bar]]
    overall: float
    tested: int
    verifications: int
    tokens_per_verification: float


def acceptance_of(view: View) -> Acceptance:
    """Count what was kept.

    Raises:
        TraceError: The run was a plain one, or no drafted token was tested.
    """
    found = lossless_facts(Scope.of(view.trace, view.request))
    if found is None or not found["tested"]:
        raise TraceError(
            f"trace {view.trace.path} has no drafted tokens of request {view.request}; record it with "
            "--lossless"
        )
    return Acceptance(
        sides={
            "places": _bars(found["places"], "place"),
            "depths": _bars(found["depths"], "depth"),
        },
        overall=found["token_acceptance"],
        tested=found["tested"],
        verifications=found["verifications"],
        tokens_per_verification=found["tokens_per_verification"],
    )


def caption(data: Acceptance) -> Caption:
    """Describe the figure."""
    note = (
        f"{data.verifications:,} verifications tested {data.tested:,} drafted tokens and kept "
        f"{data.overall:.1%} of them; each gave {data.tokens_per_verification:.2f} tokens on average. A "
        "token is tested if all before it in its draft were kept."
    )
    return Caption("Drafted tokens that full attention kept", note)


def _bars(rows: list[dict[str, Any]], name: str) -> list[Bar]:
    bars = []
    for row in rows:
        first, last = row[f"from_{name}"], row[f"to_{name}"]
        where = f"{first}" if first == last else f"{first}-{last}"
        bars.append(Bar(where, row["acceptance"], row["tested"]))
    return bars
