"""What SyncKV and FreeKV observed, for one view: drift, head similarity, query cosine, corrections."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sfi_core.errors import TraceError
from sfi_traces.summary.corrections import corrections
from sfi_traces.summary.query_cosine import query_cosine
from sfi_traces.summary.scope import Scope
from sfi_traces.views.drift import Drift, drift
from sfi_traces.views.head_similarity import MOST_STEPS, HeadSimilarity
from sfi_traces.views.view import View

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HeadMap:
    """A number for each layer (row) and KV head (column); NaN where a layer has no such head."""

    layers: list[int]
    heads: list[int]
    value: np.ndarray

    @classmethod
    def of(cls, rows: list[Row], name: str) -> Self:
        """Take column `name` of rows with a `layer` and a `head`."""
        found = {(row["layer"], row["head"]): row[name] for row in rows}
        layers, heads = (sorted({place[axis] for place in found}) for axis in (0, 1))
        value = [[found.get((layer, head), np.nan) for head in heads] for layer in layers]
        return cls(layers, heads, np.array(value, np.float64))


def drift_of(view: View) -> Drift:
    """Compare each step's supports with step 0's; see `drift`."""
    return drift(view.supports)


def head_similarity_of(view: View) -> HeadSimilarity:
    """Compare the heads at up to 64 evenly chosen steps; see `HeadSimilarity.of`."""
    return HeadSimilarity.of(view.supports.thinned(MOST_STEPS))


def cosines_of(view: View) -> Row:
    """Average the query cosine; see `query_cosine`.

    Raises:
        TraceError: No audit, or none of a step after step 0.
    """
    view.trace.require_audit()
    found = query_cosine(_scope(view), view.head)
    if found is None:
        raise TraceError(
            f"trace {view.trace.path} has no query cosine of request {view.request}: it needs an audited "
            "step after step 0; record it with --audit 1"
        )
    return found


def corrections_of(view: View) -> Row:
    """Count the corrections; see `corrections`.

    Raises:
        TraceError: The policy corrects nothing, or no step was fast.
    """
    found = corrections(_scope(view), view.head)
    if found is None or not found["n"]:
        raise TraceError(
            f"trace {view.trace.path} has no corrections of request {view.request}, recorded with policy "
            f"{view.trace.manifest['policy']}; record it with a policy that corrects, as FreeKV does"
        )
    return found


def _scope(view: View) -> Scope:
    return Scope.of(view.trace, view.request, view.layer)
