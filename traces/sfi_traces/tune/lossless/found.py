"""What a search of lossless settings found: a ranking, what was run for real, and the file it ends in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from sfi_core.machine.versions import versions
from sfi_core.settings.config import SfiConfig
from sfi_traces.tune.lossless.outcome import Outcome
from sfi_traces.tune.lossless.search import LEAST_KNOWN, Candidate, LosslessTuning
from sfi_traces.tune.tuned import tuned_toml

SHOWN = 50  # candidates of a document


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessFound:
    """The candidates, best first.

    Attributes:
        tuning: What was searched.
        candidates: At least one.
        confirmed: What the first ones did when they ran; empty where none did.
    """

    tuning: LosslessTuning
    candidates: Sequence[Candidate]
    confirmed: Sequence[Outcome] = field(default=())

    @property
    def chosen(self) -> int:
        """The place of the fastest by bytes: as it ran, where any ran, else as predicted."""
        if not self.confirmed:
            return 0
        return max(range(len(self.confirmed)), key=lambda place: self.confirmed[place].speed)

    @property
    def rule(self) -> str:
        """Why it was chosen."""
        if self.confirmed:
            return "the most tokens a byte of those run for real"
        known = self.candidates[0].outcome.known >= LEAST_KNOWN
        return f"the most tokens a byte, predicted{'' if known else ' where little is known'}"

    def confirm(
        self, run: Callable[[Sequence[SfiConfig]], list[Outcome]], count: int
    ) -> "LosslessFound":
        """Run the best so many for real."""
        best = self.candidates[:count]
        return replace(self, confirmed=run([self.tuning.config(one) for one in best]))

    def document(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        tuning, first = self.tuning, self.tuning.traces[0]
        rows = [
            {**one.to_dict(), "chosen": place == self.chosen}
            for place, one in enumerate(self.candidates[:SHOWN])
        ]
        for row, outcome in zip(rows, self.confirmed, strict=False):
            row["measured"] = outcome.to_dict()
        return {
            "traces": [str(trace.path) for trace in tuning.traces],
            "model": first.manifest["model"].get("name"),
            "policy": first.manifest["policy"],
            "requests": len(tuning.texts),
            "tested": sum(len(text.tested) for text in tuning.texts),
            "batch_size": tuning.costs.model.batch,
            "candidates": len(self.candidates),
            "least_known": LEAST_KNOWN,
            "recorded": tuning.recorded.to_dict(),
            "settings": rows,
            "rule": self.rule,
            "config": tuning.config(self.candidates[self.chosen]).to_dict(),
        }

    def toml(self) -> str:
        """Return the chosen settings and where they come from, for `--config`."""
        chosen = self.candidates[self.chosen]
        ran = self.confirmed[self.chosen].to_dict() if self.confirmed else None
        return tuned_toml(
            self.tuning.config(chosen),
            {
                "command": "sfi tune --lossless",
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "model": self.tuning.traces[0].manifest["model"].get("name"),
                "trigger_set": chosen.chosen and chosen.chosen.name,
                "rule": self.rule,
                "versions": versions(),
                "traces": [
                    {"path": str(one.path), "created": one.manifest["created"]}
                    for one in self.tuning.traces
                ],
                "predicted": chosen.outcome.to_dict(),
                "confirmed": ran,
            },
        )
