"""What is counted of a request and decides nothing; no torch."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """The counts and times of one request; only `Run` changes them.

    Attributes:
        slow_at: Steps with g_t = 1.
        reasons: Slow steps by reason.
        attended: Tokens read by the decoding steps from step 1 on, per KV head and full-attention layer.
        selecting: What selecting read on the fast ones of these steps, in tokens' worth of keys and values.
        context: Tokens that full attention would have read.
        verifications: Of a lossless run: dense passes after the prompt's.
        drafted: Tokens that its fast steps drafted.
        tested: Those whose every predecessor was kept.
        accepted: Those that were kept.
        queued_seconds: From the run's beginning until the prompt began to be read.
        prefill_seconds: From then to the first token.
        decode_seconds: From the first token to the last.
        last_token_at: When the last token was there, by the clock of `time.perf_counter`.
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
        """Count what one decoding step read, what full attention reads, and what selecting read."""
        self.attended += attended
        self.context += context
        self.selecting += selecting

    def count_verification(self, drafted: int, accepted: int) -> None:
        """Count a verification of so many drafted tokens, of which the first were accepted."""
        self.verifications += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tested += min(drafted, accepted + 1)

    def time_step(self, step: int, began: float, now: float) -> None:
        """Note that the step that began then is over; a decoding step counts from the token before it."""
        if step > 0:
            self.decode_seconds += now - self.last_token_at
        else:
            self.prefill_seconds += now - began
        self.last_token_at = now
