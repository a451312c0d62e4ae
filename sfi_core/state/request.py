"""The managed sparse state of a request: the plain numbers that decide what its next step does; no torch."""

from dataclasses import dataclass, field

from sfi_core.state.tally import Tally


@dataclass(slots=True)
class RequestState:
    """What decides about one request; plain numbers, so that deciding costs no device sync.

    Attributes:
        request: Which request of the run this is.
        prompt_tokens: Tokens of the prompt, padding excluded; known once it is read.
        length: Tokens in the cache; within a pass, the pass's own included.
        step: Decoding step t; 0 is the prefill's last position; -1 before it.
        slow: Whether step t is slow, g_t.
        reason: Why it is slow.
        steps_since_slow: Fast steps since the last slow step.
        recent_start: First position of the recent segment.
        read_start: First token after the packed ones that a KV head reads in step t if it reads sparsely:
            `recent_start`, but on an anchored slow step, where the packed memory is still the last one.
        packed_tokens: Sink and selected tokens per KV head.
        sparse_tokens: What such a head reads on a slow step.
        next_packed: `packed_tokens` from the next step on, where it was selected ahead; None otherwise.
        tokens: Generated ids x_0, x_1, ...
        drafted: How many of the last tokens of a lossless run are drafts, which no dense pass has verified.
        fresh: Whether the selected memory fits what comes next; False in a lossless run after a rejection.
        finished: Whether the request has ended: with a stop token, or with as many tokens as it may have.
        tally: What is counted and decides nothing.
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
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    fresh: bool = True
    finished: bool = False
    tally: Tally = field(default_factory=Tally)

    @property
    def fast_tokens(self) -> int:
        """Tokens that a fast step reads per KV head: sink, selected and recent (as Eq. 1)."""
        return self.packed_tokens + self.length - self.recent_start

    def read(self, *, dense: bool) -> int:
        """Return the tokens that a layer reads per KV head, if all its heads read densely or none does."""
        return self.length if dense else self.fast_tokens

    def sink(self, sink: int) -> int:
        """Return how many of `sink` anchor tokens the request has: those of its prompt, all run long."""
        return min(sink, self.prompt_tokens)

    def begin(self, *, slow: bool, reason: str, new_tokens: int, steps: int = 1) -> None:
        """Enter the next step with `new_tokens` more tokens in the cache; several steps, if it verifies."""
        self.step += steps
        self.length += new_tokens
        self.steps_since_slow = 0 if slow else self.steps_since_slow + 1
        self.slow, self.reason = slow, reason
        if self.next_packed is not None:
            self.packed_tokens, self.next_packed = self.next_packed, None

    def take_back(self, tokens: int) -> None:
        """Leave out the last `tokens` tokens with their steps: those of a draft."""
        self.step -= tokens
        self.length -= tokens
        del self.tokens[len(self.tokens) - tokens :]

    def finish_step(self, token_id: int) -> None:
        """Note the token x_t that the step generated; a step that broke off is not counted."""
        self.tokens.append(token_id)
        if self.slow:
            self.tally.count_slow(self.step, self.reason)

    def move_recent(self, sink: int, recent: int, *, sliding: bool) -> None:
        """Place the recent segment; a fast step keeps the selected memory as it is (Eq. 3).

        The segment is the last `recent` tokens at a slow step. On a fast step it slides with them, or stays
        where it starts and grows (`anchored`).
        """
        last = max(self.sink(sink), self.length - recent)
        self.read_start = last if sliding else self.recent_start
        self.sparse_tokens = self.packed_tokens + self.length - self.read_start
        if self.slow or sliding:
            self.recent_start = last

    def note_packed(self, sink: int, selected: int, *, ahead: bool = False) -> None:
        """Note that a layer packed the sinks and up to `selected` positions of J.

        Top-K pads only where J has fewer positions, so that the count needs no look at the device. `ahead`
        says that the next step reads it, when one more token has left the recent segment.
        """
        sink = self.sink(sink)
        if ahead:
            self.next_packed = sink + min(selected, self.recent_start + 1 - sink)
        else:
            self.packed_tokens = sink + min(selected, self.recent_start - sink)

    def attended(self, layers: int, dense_layers: int, mixed: float | None = None) -> float:
        """Return the tokens that the step reads per KV head, the mean over the full-attention layers.

        Args:
            layers: Full-attention layers.
            dense_layers: Those of them that are dense at every step.
            mixed: Where only some heads of the other layers read everything: how many layers' worth.
        """
        if self.slow and mixed is None:
            return self.length
        whole = dense_layers + (mixed or 0.0)
        sparse = self.sparse_tokens if self.slow else self.fast_tokens
        return (whole * self.length + (layers - whole) * sparse) / max(1, layers)
