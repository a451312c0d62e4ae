"""What a lossless run does and reads: in the mean, as predicted, or as a trace recorded it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from sfi_core.errors import TraceError
from sfi_core.models.byte_model import ByteModel, Count
from sfi_core.policies import policy_class
from sfi_core.settings.config import SfiConfig
from sfi_traces.read.reader import Trace
from sfi_traces.summary.lossless import lossless_facts
from sfi_traces.summary.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Sums over texts; of a prediction, expected ones.

    Attributes:
        tokens: Tokens generated after the prompt's own.
        verifications: Passes that verified.
        drafted: Tokens drafted.
        accepted: Those kept.
        read_tokens: Tokens attended, of all passes.
        bytes: Bytes read, of all passes.
        full_tokens: Tokens that full attention would have attended.
        full_bytes: Bytes that full attention would have read.
        known: Share of the tested tokens whose acceptance was measured in some number; 1 of a recorded run.
    """

    tokens: float
    verifications: float
    drafted: float
    accepted: float
    read_tokens: float
    bytes: float
    full_tokens: float
    full_bytes: float
    known: float = 1.0

    @classmethod
    def sum(cls, parts: Sequence[Self]) -> Self:
        """Join recorded runs."""
        names = [one.name for one in fields(cls) if one.name != "known"]
        return cls(**{name: sum(getattr(one, name) for one in parts) for name in names})

    @property
    def speed(self) -> float:
        """Tokens a byte, as a multiple of full attention's."""
        return self.full_bytes / self.bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "tokens": self.tokens,
            "verifications": self.verifications,
            "accepted_per_verification": self.accepted / self.verifications,
            "acceptance": self.accepted / self.drafted if self.drafted else None,
            "read_ratio": self.read_tokens / self.full_tokens,
            "tokens_per_byte": self.tokens / self.bytes,
            "speed": self.speed,
            "known": self.known,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What passes read.

    Attributes:
        model: Their bytes.
        attended: Tokens that a drafting step attends to, less those that it drafted; the layers' mean.
        grows: Tokens more for each drafted one: 1 with anchored recent tokens, 0 with sliding ones.
        packed: Sink and selected tokens.
        refreshes: Whether a verification selects anew.
    """

    model: ByteModel
    attended: float
    grows: int
    packed: int
    refreshes: bool = True

    @classmethod
    def of(cls, traces: Sequence[Trace], config: SfiConfig, batch: int) -> Self:
        """Take what drafting steps attended to from traces of one model and one memory.

        Args:
            traces: The traces.
            config: Their settings.
            batch: Requests that share the weights.
        """
        grows = int(config.recent_mode == "anchored")
        found = []
        for trace in traces:
            columns = ["drafted", "attended_tokens", "context_tokens", "steps_since_slow"]
            found += [
                row["attended_tokens"] - grows * row["steps_since_slow"]
                for row in trace.table("steps", columns).to_pylist()
                if row["drafted"] and row["attended_tokens"] < row["context_tokens"]
            ]
        packed = config.sink + config.budget
        return cls(
            model=ByteModel.of(
                traces[0].manifest["model"], dense_layers=config.dense_layers, batch=batch
            ),
            attended=float(np.mean(found)) if found else float(packed + config.recent),
            grows=grows,
            packed=packed,
            refreshes=policy_class(traces[0].manifest["policy"]).refreshes(),
        )

    def drafting(self, length: Count, depth: Count) -> Count:
        """Return the tokens that the step of a draft's token number `depth` attends to."""
        return np.minimum(length, self.attended + self.grows * depth)

    def fast(self, length: Count, attended: Count) -> Count:
        """Return the bytes of a drafting step that attends to so many tokens in the layers' mean."""
        return self.model.mean(length, attended, 0.0, 0.0)

    def slow(self, length: Count) -> Count:
        """Return the bytes of a verification; its further queries are left out."""
        if not self.refreshes:
            return self.model.dense(length)
        return self.model.slow(length, np.minimum(length, self.packed))


def recorded_outcome(trace: Trace, costs: Costs) -> Outcome:
    """Sum up what a lossless trace recorded.

    Raises:
        TraceError: It verified nothing.
    """
    facts = lossless_facts(Scope.of(trace))
    if facts is None:
        raise TraceError(f"trace {trace.path} must have verifications, got none")
    rows = trace.table("verifications", ["base", "drafted", "attended_tokens"])
    base, drafted, attended = (np.asarray(rows[name], np.float64) for name in rows.column_names)
    length = base + drafted + 1
    each = (attended - length) / np.maximum(1, drafted)
    # drafting steps read as those at the middle of the draft
    read = drafted * costs.fast(base + (drafted + 1) / 2, each) + costs.slow(length)
    steps = trace.table("steps", ["step", "context_tokens"])
    context = np.asarray(steps["context_tokens"])[np.asarray(steps["step"]) > 0]
    return Outcome(
        tokens=facts["tokens"],
        verifications=facts["verifications"],
        drafted=facts["drafted"],
        accepted=facts["accepted"],
        read_tokens=facts["mean_attended_tokens"] * facts["tokens"],
        bytes=float(np.sum(read)),
        full_tokens=float(np.sum(context)),
        full_bytes=float(np.sum(costs.model.dense(context))),
    )
