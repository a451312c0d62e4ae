"""The managed sparse state of a request: what the run knows of it, in plain numbers; no torch."""

import math
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SparseState:
    """What the run knows of one request; plain numbers, so that deciding costs no device sync.

    Attributes:
        request: Which request of the run this is.
        prompt_tokens: Tokens of the prompt, padding excluded; known once it is read.
        length: Tokens in the cache.
        step: Decoding step t; 0 is the prefill's last position; -1 before it.
        slow: Whether step t is slow, g_t.
        reason: Why it is slow.
        steps_since_slow: Fast steps since the last slow step.
        recent_start: First position of the recent segment.
        packed_tokens: Sink and selected tokens per KV head.
        tokens: Generated ids x_0, x_1, ...
        finished: Whether the request has ended: with a stop token, or with as many tokens as it may have.
        slow_at: Steps with g_t = 1.
        reasons: Slow steps by reason.
        attended: Tokens read by the decoding steps from step 1 on, per KV head and full-attention layer.
        selecting: What selecting read on the fast ones of these steps, in tokens' worth of keys and values.
        context: Tokens that full attention would have read.
        cosine: Mean cosine of the last step's query with an earlier one, where a trigger looks at it.
        entropy: Entropy of the last step's next-token distribution in nats, where a trigger looks at it.
        queued_seconds: From the run's beginning until its prompt began to be read.
        prefill_seconds: From then to its first token.
        decode_seconds: From its first token to its last.
        told_at: When its last token was there, by the clock of `time.perf_counter`.
    """

    request: int = 0
    prompt_tokens: int = 0
    length: int = 0
    step: int = -1
    slow: bool = True
    reason: str = ""
    steps_since_slow: int = 0
    recent_start: int = 0
    packed_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    slow_at: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    attended: float = 0.0
    selecting: float = 0.0
    context: int = 0
    cosine: float = math.nan
    entropy: float = math.nan
    queued_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    told_at: float = 0.0

    def sink(self, sink: int) -> int:
        """Return how many of `sink` anchor tokens the request has: those of its prompt, all run long."""
        return min(sink, self.prompt_tokens)

    def begin(self, *, slow: bool, reason: str, new_tokens: int) -> None:
        """Enter the next step with `new_tokens` more tokens in the cache."""
        self.step += 1
        self.length += new_tokens
        self.steps_since_slow = 0 if slow else self.steps_since_slow + 1
        self.slow, self.reason = slow, reason

    def finish_step(self, token_id: int) -> None:
        """Note the token x_t that the step generated; a step that broke off is not counted."""
        self.tokens.append(token_id)
        if self.slow:
            self.slow_at.append(self.step)
            self.reasons[self.reason] += 1

    def time_step(self, began: float, now: float) -> None:
        """Note that the step that began then is over; a decoding step counts from the token before it."""
        if self.step > 0:
            self.decode_seconds += now - self.told_at
        else:
            self.prefill_seconds += now - began
        self.told_at = now

    def move_recent(self, sink: int, recent: int, *, sliding: bool) -> None:
        """Place the recent segment; a fast step keeps the selected memory as it is (Eq. 3).

        The segment is the last `recent` tokens at a slow step. On a fast step it slides with them, or stays
        where it starts and grows (`anchored`).
        """
        if self.slow or sliding:
            self.recent_start = max(self.sink(sink), self.length - recent)
