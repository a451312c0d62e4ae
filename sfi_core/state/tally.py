"""Counts and times of a request, for its report. No torch."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """The counts and times of one request; fields that are not listed here are those of `RequestReport`.

    Attributes:
        attended: Tokens read by the decoding steps from step 1 on, per KV head and full-attention layer.
        selecting: Reads of the selection on the fast ones of these steps, in tokens' worth.
        context: Tokens that full attention would have read in these steps.
        last_token_at: When the last token came, by `time.perf_counter`.
    """

    slow_at: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    attended: float = 0.0
    selecting: float = 0.0
    context: int = 0
    verifications: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    queued_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    last_token_at: float = 0.0

    def count_slow(self, step: int, reason: str) -> None:
        """Count a slow step."""
        self.slow_at.append(step)
        self.reasons[reason] += 1

    def count_reads(self, attended: float, context: int, selecting: float) -> None:
        """Count the reads of a decoding step, of full attention in its place, and of the selection."""
        self.attended += attended
        self.context += context
        self.selecting += selecting

    def count_verification(self, drafted: int, accepted: int) -> None:
        """Count a verification that accepted the first `accepted` of `drafted` tokens."""
        self.verifications += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tested += min(drafted, accepted + 1)

    def time_step(self, step: int, began: float, now: float) -> None:
        """Add the time of a step that has ended; a decoding step counts from the last token."""
        if step > 0:
            self.decode_seconds += now - self.last_token_at
        else:
            self.prefill_seconds += now - began
        self.last_token_at = now
