"""What the scheduler tells the workers of one step, in plain numbers; no torch, no vLLM."""

from dataclasses import dataclass, field

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """One scheduled request of one engine step.

    Attributes:
        request: Its number among all that the server has seen.
        slot: The row of its packed segments; `NO_SLOT` for a request that runs dense.
        start: Tokens in the cache before the step.
        count: New tokens.
        block: The block of the last new token. No other request has it, so it identifies the batch's row.
        decode: Whether the request decodes; otherwise it reads a piece of its prompt.
        final: Whether the piece is the prompt's last, or the last that is recomputed after a preemption.
        slow: Whether a decoding step is dense, g_t.
        reason: Why a step is slow.
        step: The decoding step t; of a piece before the last, the first step to come.
        opens: Whether the request gets its slot with this piece.
        generated: Tokens generated before the slot was opened.
    """

    request: int
    slot: int
    start: int
    count: int
    block: int
    decode: bool
    final: bool = False
    slow: bool = True
    reason: str = ""
    step: int = 0
    opens: bool = False
    generated: int = 0


@dataclass(slots=True)
class Plan:
    """The plan of one step: the scheduled requests, and the slots freed since the last step."""

    entries: list[Entry] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
