"""What the scheduler tells the workers of one step, in plain numbers; no vLLM."""

from dataclasses import dataclass, field

from sfi_core.engine.ledger import RequestPass
from sfi_kernels.step_descriptor import PROMPT

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """One scheduled request of one engine step; `request` is its number among all that the server has seen.

    `slot` is the row of its packed segments, `NO_SLOT` for a request that runs dense. `start` are the tokens
    in the cache before the step, `block` is the block of the last new token: no other request has it, so it
    identifies the batch's row. After a preemption the generated tokens are part of the prompt that `one`
    reads. `step` is the decoding step t; of a piece of the prompt before the last, the first step to come.
    `opens` says whether the request gets its slot with this piece, and `generated` counts the tokens before
    that.
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
