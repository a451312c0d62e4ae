"""A tuned setting's real run beside its prediction."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sfi_traces.replay import Comparison

MEASURED = ("kl_next_token", "argmax_agreement", "decode_tokens_per_second", "exact_match")


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A setting's prediction beside its run.

    Attributes:
        comparison: Over the steps whose earlier tokens are the trace's.
        kl_next_token: Mean KL from dense attention's next-token distribution at fast steps, nats.
        argmax_agreement: Share of fast steps with dense attention's most probable token.
        decode_tokens_per_second: Speed without the audit.
        exact_match: Whether the answer is right, word for word; None if the right one is unknown.
    """

    comparison: Comparison
    kl_next_token: float | None
    argmax_agreement: float | None
    decode_tokens_per_second: float
    exact_match: bool | None

    @property
    def error(self) -> float:
        """Predicted retained mass (lower bound) less the measured one."""
        found = self.comparison
        return found.predicted.retained_mass - found.measured.retained_mass

    @property
    def bounds(self) -> float:
        """The width of the replay's own bounds."""
        predicted = self.comparison.predicted
        return predicted.retained_mass_upper - predicted.retained_mass

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        compared = self.comparison
        return {
            "predicted": asdict(compared.predicted),
            "measured": asdict(compared.measured),
            "steps": sum(one.steps for one in compared.requests),
            "recorded_steps": sum(one.recorded_steps for one in compared.requests),
            "same_schedule": compared.same_schedule,
            "error": self.error,
            **{name: getattr(self, name) for name in MEASURED},
        }


def stated_errors(rows: Sequence[Confirmation]) -> list[float | None]:
    """Return the error to expect of each prediction; None for a single row.

    It is the width of the replay's bounds, for positions that were not recorded, plus the largest error among
    the *other* rows, for what a replay does not model.
    """
    return [
        one.bounds + max(abs(other.error) for other in rows if other is not one) if len(rows) > 1 else None
        for one in rows
    ]
