"""The forecast of lossless runs, computed from bytes and a stated acceptance; nothing runs."""

from dataclasses import dataclass
from typing import Any

import torch

from sfi_core.engine.lossless.rule import best_length
from sfi_core.measure.bench.byte_roofline import (
    NOTES,
    Expectation,
    forecast_document,
    step_bytes,
)
from sfi_core.measure.bench.settings import LOSSLESS, DecodeSettings
from sfi_core.models.byte_model import cycle_mean, cycle_tokens
from sfi_core.policies import policy_class

NOTE = (
    "lossless: acceptance is stated, {:g} for each tested token; a verification reads as much as a slow "
    "step; the mean is of a token of each request"
)


@dataclass(frozen=True, slots=True)
class Cycle:
    """A draft and its verification, on average.

    Attributes:
        drafts: Tokens drafted before a verification.
        tokens: Tokens that the verification gives.
        again: Share of the verifications that a slow step of the corrected token follows, which selects.
    """

    drafts: int
    tokens: float
    again: float

    @property
    def passes_per_token(self) -> float:
        """Forward passes per token."""
        return (self.drafts + 1 + self.again) / (self.tokens + self.again)


def lossless_forecast_document(
    model: Any, settings: DecodeSettings, device: torch.device, **sizes: float | None
) -> dict[str, Any]:
    """Compute `forecast_document` with a second row for each policy: its lossless run."""
    assert settings.acceptance is not None, "a forecast has a stated acceptance"
    notes = (*NOTES, NOTE.format(settings.acceptance))
    return forecast_document(
        model, settings, device, **sizes, kind=LosslessExpectation, notes=notes
    )


class LosslessExpectation(Expectation):
    """Computes rows for lossless runs too."""

    @property
    def names(self) -> list[str]:
        """The policies, each followed by its lossless run if the policy can draft."""
        return [
            name
            for policy in super().names
            for name in (policy, *([LOSSLESS.format(policy)] * policy_class(policy).drafts))
        ]

    def row(
        self, policy: str, context: int, batch: int, bandwidth_gb_per_s: float, memory: int
    ) -> dict[str, Any]:
        """Return the row of a policy, or of its lossless run, at a point."""
        nothing = dict.fromkeys(
            ("stated_acceptance", "drafts", "tokens_per_verification", "passes_per_token")
        )
        if policy in self.settings.policies:
            row = super().row(policy, context, batch, bandwidth_gb_per_s, memory)
            return {**row, "lossless": False, **nothing}
        plain = next(one for one in self.settings.policies if LOSSLESS.format(one) == policy)
        row = super().row(plain, context, batch, bandwidth_gb_per_s, memory)
        return {
            **row,
            "policy": policy,
            "lossless": True,
            **self._measures(row, bandwidth_gb_per_s),
        }

    def cycle(self, policy: str, context: int, batch: int) -> Cycle:
        """Return the mean cycle of a request in a policy's lossless run.

        A draft ends before a stated slow step, at `draft.max_tokens`, and with `draft.adaptive` at the length
        that the engine chooses for this acceptance. The shorter last draft of a sentence is not counted.
        """
        settings, config = self.settings, self.settings.config.draft
        acceptance, rate = settings.acceptance or 0.0, self._rate if policy == "sfi" else 0
        most = config.max_tokens
        if rate:
            most = min(most, int(1 / rate) - 1)  # of a fraction: exact
        if config.adaptive and most:
            fast, slow = self._steps(policy, context, batch, most)
            most = best_length(acceptance, min(1.0, fast / slow), most)
        again = 1 - acceptance**most if policy == "sfi" else 0.0
        return Cycle(most, cycle_tokens(acceptance, most), again)

    def _steps(self, policy: str, context: int, batch: int, drafts: int) -> tuple[float, float]:
        # bytes of a fast step and a verification; an anchored recent window grows with the drafts
        rate, config = 1 / (drafts + 1), self.settings.config
        return step_bytes(self.byte_model(batch), config, policy, context, rate)

    def _measures(self, row: dict[str, Any], bandwidth_gb_per_s: float) -> dict[str, Any]:
        policy, context, batch = (row[name] for name in ("policy", "context", "batch"))
        cycle = self.cycle(policy, context, batch)
        fast, slow = self._steps(policy, context, batch, cycle.drafts)
        mean = float(
            cycle_mean(fast, slow, drafted=cycle.drafts, tokens=cycle.tokens, again=cycle.again)
        )
        return {
            "slow_rate": (1 + cycle.again) / (cycle.drafts + 1 + cycle.again),
            "fast_bytes_per_step": round(batch * fast),
            "slow_bytes_per_step": round(batch * slow),
            "bytes_per_step": round(batch * mean),
            "roofline_tokens_per_second": bandwidth_gb_per_s * 1e9 / mean,
            "roofline_speedup": float(self.byte_model(batch).dense(context)) / mean,
            "synchronized_roofline_speedup": None,
            "break_even_context": None,
            "stated_acceptance": self.settings.acceptance,
            "drafts": cycle.drafts,
            "tokens_per_verification": cycle.tokens,
            "passes_per_token": cycle.passes_per_token,
        }
