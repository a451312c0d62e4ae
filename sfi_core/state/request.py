"""The managed sparse state of a request, in plain numbers. No torch, so that planning needs no sync."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """The counts and times of one request, named as those of `RequestReport`.

    The decoding steps from step 1 on read `attended` tokens per KV head and full-attention layer, and `selecting` to
    choose, where full attention would have read `context`. `known` prompt tokens came from a `PromptCache`. The last
    token came at `last_token_at` of `sfi_kernels.compiled.clock`.
    """

    slow_at: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    attended: float = 0.0
    selecting: float = 0.0
    context: int = 0
    known: int = 0
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
        """Count the reads of a decoding step."""
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
        """Add the time of a step; a decoding step counts from the last token."""
        if step > 0:
            self.decode_seconds += now - self.last_token_at
        else:
            self.prefill_seconds += now - began
        self.last_token_at = now


@dataclass(slots=True)
class RequestState:
    """The state of one request; `step`, `slow`, `reason` and `steps_since_slow` are those of `StepEvent`.

    The `prompt_tokens`, without padding, are known once the prompt has been read. `length` are the tokens in the cache,
    those of the pass under way included. In a lossless run the last `drafted` of the generated `tokens` are unverified,
    and the selection is not `fresh` after a rejected token.

    Attributes:
        recent_start: First position of the recent segment.
        read_start: First recent position that a sparse KV head reads in this step: `recent_start`, except on
            an anchored slow step, which still reads the last selection and all tokens since.
        packed_tokens: Sink and selected tokens per KV head, at most.
        unfilled: By how much the selections are smaller, the mean over KV heads and layers: a policy may select fewer
            positions than the budget.
        sparse_tokens: Tokens that a sparse KV head reads on a slow step.
        next_packed: `packed_tokens` from the next step on, if its selection was made ahead; else None.
    """

    request: int = 0
    prompt_tokens: int = 0
    length: int = 0
    step: int = -1
    slow: bool = True
    reason: str = ""
    steps_since_slow: int = 0
    recent_start: int = 0
    read_start: int = 0
    packed_tokens: int = 0
    sparse_tokens: int = 0
    next_packed: int | None = None
    unfilled: float = 0.0
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    fresh: bool = True
    finished: bool = False
    tally: Tally = field(default_factory=Tally)

    @property
    def fast_tokens(self) -> float:
        """Tokens that a fast step reads per KV head: sink, selected and recent (Eqs. 1 and 25)."""
        return self.packed_tokens - self.unfilled + self.length - self.recent_start

    def read(self, *, dense: bool) -> float:
        """Return the tokens that a layer reads per KV head, if all its heads are dense or all are sparse."""
        return self.length if dense else self.fast_tokens

    def sink(self, sink: int) -> int:
        """Return the request's number of sink tokens: at most those of its prompt."""
        return min(sink, self.prompt_tokens)

    def begin(self, *, slow: bool, reason: str, new_tokens: int, steps: int = 1) -> None:
        """Enter the next step with `new_tokens` more tokens in the cache; a verification enters several."""
        self.step += steps
        self.length += new_tokens
        self.steps_since_slow = 0 if slow else self.steps_since_slow + 1
        self.slow, self.reason = slow, reason
        if self.next_packed is not None:
            self.packed_tokens, self.next_packed = self.next_packed, None

    def finish_step(self, token_id: int) -> None:
        """Note the token x_t of the step, and count the step if it is slow."""
        self.tokens.append(token_id)
        if self.slow:
            self.tally.count_slow(self.step, self.reason)

    def move_recent(self, sink: int, recent: int, *, sliding: bool) -> None:
        """Move the recent segment; a fast step keeps the selected memory as it is (Eq. 3).

        On a slow step the segment is the last `recent` tokens. On a fast step it slides, or its start stays
        and it grows (`anchored`).
        """
        last = max(self.sink(sink), self.length - recent)
        self.read_start = last if sliding else self.recent_start
        self.sparse_tokens = self.packed_tokens + self.length - self.read_start
        if self.slow or sliding:
            self.recent_start = last

    def note_packed(self, sink: int, selected: int, *, ahead: bool = False) -> None:
        """Note that a layer packed the sinks and at most the smaller of `selected` and |J| positions.

        `ahead` is for a selection that the next step reads, when one more token has left the recent segment.
        """
        sink = self.sink(sink)
        if ahead:
            self.next_packed = sink + min(selected, self.recent_start + 1 - sink)
        else:
            self.packed_tokens = sink + min(selected, self.recent_start - sink)

    def attended(self, layers: int, dense_layers: int, mixed: float | None = None) -> float:
        """Return the tokens that the step reads per KV head, the mean over the full-attention `layers`.

        `dense_layers` of them are dense at every step; of the others, where only some heads are dense, `mixed` is the
        sum of these heads' shares.
        """
        if self.slow and mixed is None:
            return self.length
        whole = dense_layers + (mixed or 0.0)
        sparse = self.sparse_tokens - self.unfilled if self.slow else self.fast_tokens
        return (whole * self.length + (layers - whole) * sparse) / max(1, layers)
