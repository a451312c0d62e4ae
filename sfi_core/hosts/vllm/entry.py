"""What the scheduler tells the workers of one step, in plain numbers; no torch, no vLLM."""

from dataclasses import dataclass, field

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """One scheduled request of one engine step.

    Attributes:
        request: Its number among all that the server has seen.
        slot: Where its packed segments are; `NO_SLOT` for a request that runs dense.
        start: Tokens in the cache before the step.
        count: New tokens.
        block: The block that the last new token goes to. It is nobody else's, so it names the batch's row.
        decode: Whether it decodes; otherwise it reads a piece of its prompt.
        final: Whether the piece is the prompt's last, or the last of what is recomputed after a preemption.
        slow: Whether a decoding step is dense, g_t.
        reason: Why a step is slow.
        step: Decoding step t that it enters; the one it will begin with, for a piece before the last.
        opens: Whether the slot is given to the request with this piece.
        generated: Tokens generated before, of a request that opens a slot.
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
    """What the workers are told of one step.

    Attributes:
        entries: The scheduled requests.
        freed: Slots that have become free since the last step.
    """

    entries: list[Entry] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
