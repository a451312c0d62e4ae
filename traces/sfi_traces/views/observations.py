"""What FreeKV observed, for one view: query cosine and corrections."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sfi_core.errors import TraceError
from sfi_traces.summary.corrections import corrections
from sfi_traces.summary.query_cosine import query_cosine
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


def cosines_of(view: View) -> Row:
    """Average the query cosine; see `query_cosine`.

    Raises:
        TraceError: No audit, or none of a step after step 0.
    """
    view.trace.require_audit()
    found = query_cosine(view.scope, view.head)
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
    found = corrections(view.scope, view.head)
    if found is None or not found["n"]:
        raise TraceError(
            f"trace {view.trace.path} has no corrections of request {view.request}, recorded with policy "
            f"{view.trace.manifest['policy']}; record it with a policy that corrects, as FreeKV does"
        )
    return found
