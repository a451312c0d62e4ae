"""What the scheduler tells the workers of one step, in plain numbers; no vLLM."""

from dataclasses import dataclass, field

from sfi_core.engine.ledger import RequestPass
from sfi_kernels.step_descriptor import PROMPT

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """One scheduled request of one engine step.

    Attributes:
        request: Its number among all that the server has seen.
        slot: The row of its packed segments; `NO_SLOT` for a request that runs dense.
        start: Tokens in the cache before the step.
        block: The block of the last new token. No other request has it, so it identifies the batch's row.
        one: What the request does. After a preemption the generated tokens are part of its prompt.
        step: The decoding step t; of a piece of the prompt before the last, the first step to come.
        opens: Whether the request gets its slot with this piece.
        generated: Tokens generated before the slot was opened.
    """

    request: int
    slot: int
    start: int
    block: int
    one: RequestPass
    step: int = 0
    opens: bool = False
    generated: int = 0

    @property
    def count(self) -> int:
        """New tokens."""
        return self.one.count

    @property
    def decode(self) -> bool:
        """Whether the request decodes; otherwise it reads a piece of its prompt."""
        return self.one.kind != PROMPT


@dataclass(slots=True)
class Plan:
    """The plan of one step: the scheduled requests, and the slots freed since the last step."""

    entries: list[Entry] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
