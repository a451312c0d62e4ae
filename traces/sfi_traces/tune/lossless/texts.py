"""The texts of lossless traces, which are full attention's own, and which drafted tokens they kept."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sfi_core.errors import TraceError
from sfi_traces.read.reader import Trace

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """A drafted token that a verification looked at.

    Attributes:
        step: The step whose token was drafted.
        depth: Place in the draft, from 1.
        kept: Whether full attention picked the same token.
    """

    step: int
    depth: int
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One request.

    Attributes:
        tokens: The generated tokens, by step.
        context_T: Cached tokens that full attention reads in each step.
        tested: The drafted tokens that were tested.
    """

    tokens: tuple[int, ...]
    context_T: Ints
    tested: tuple[Tested, ...]

    def places(self, token_ids: Iterable[int]) -> Ints:
        """Return the place in the sentence of each token, 0 after a trigger and at the beginning, [T]."""
        step_T = np.arange(len(self.tokens))
        ends_T = np.isin(self.tokens, [*token_ids])
        first_T = np.where(ends_T, step_T + 1, 0)[:-1]
        return step_T - np.maximum.accumulate(np.concatenate([[0], first_T]))


def load_texts(trace: Trace) -> list[Text]:
    """Read the requests of a lossless trace that generated something after the prompt's own token.

    Raises:
        TraceError: A plain run, a redacted one, one that ended drafts by their confidence, or an empty one.
    """
    _check(trace)
    columns = ["request", "step", "token_id", "context_tokens", "drafted", "steps_since_slow"]
    steps = trace.table("steps", [*columns, "draft_token_id"]).sort_by(
        [("request", "ascending"), ("step", "ascending")]
    )
    requests: dict[int, list[Mapping[str, Any]]] = {}
    for row in steps.to_pylist():
        requests.setdefault(row["request"], []).append(row)
    rejected: dict[int, dict[int, int]] = {}
    for row in trace.table("verifications").to_pylist():
        if row["accepted"] < row["drafted"]:
            rejected.setdefault(row["request"], {})[row["step"]] = row["accepted"] + 1
    texts = [
        _text(rows, rejected.get(request, {})) for request, rows in requests.items() if rows[1:]
    ]
    if not any(text.tested for text in texts):
        raise TraceError(f"trace {trace.path} must have drafted tokens that were tested, got none")
    return texts


def _check(trace: Trace) -> None:
    if not trace.lossless:
        raise TraceError(
            f"trace {trace.path} must be of a lossless run, got a plain one; record it with "
            "sfi generate --lossless --trace DIR"
        )
    if trace.redacted:
        raise TraceError(f"trace {trace.path} must have its tokens, got a redacted one")
    confidence = trace.manifest["config"].get("draft", {}).get("confidence", 0.0)
    if confidence:
        raise TraceError(
            f"trace {trace.path} must have drafts that go on at any draft.confidence, got {confidence}; "
            "record it with 0"
        )


def _text(rows: list[Mapping[str, Any]], rejected: Mapping[int, int]) -> Text:
    tested = []
    for row in rows:
        step = row["step"]
        if row["drafted"]:
            tested.append(Tested(step=step, depth=row["steps_since_slow"], kept=True))
        elif step in rejected:  # a drafted stop token is the verification's own, and right
            same = row["draft_token_id"] == row["token_id"]
            tested.append(Tested(step=step, depth=rejected[step], kept=same))
    return Text(
        tokens=tuple(row["token_id"] for row in rows),
        context_T=np.array([row["context_tokens"] for row in rows], np.int64),
        tested=tuple(tested),
    )
