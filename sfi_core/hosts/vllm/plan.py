"""The plan of an engine step, in plain numbers: vLLM's scheduler makes it, its workers get it."""

from dataclasses import dataclass

from sfi_core.engine.ledger import RequestPass
from sfi_kernels.step_descriptor import PROMPT

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class Entry:
    """One scheduled request of one engine step; `request` is its number among all that the server has seen.

    `slot` is the row of its packed segments, `NO_SLOT` for a request that runs dense. `start` are the tokens in the
    cache before the step, `block` is that of the last new token, which no other request has. After a preemption
    `request_pass` reads the generated tokens too. `step` is the decoding step t, within the prompt the first one to
    come. `opens` says whether the request gets its slot with this piece, after `generated` tokens, `selects` whether it
    then selects anew by the evidence of this step.
    """

    request: int
    slot: int
    start: int
    block: int
    request_pass: RequestPass
    step: int = 0
    opens: bool = False
    generated: int = 0
    selects: bool = False

    @property
    def count(self) -> int:
        """New tokens."""
        return self.request_pass.count

    @property
    def length(self) -> int:
        """Tokens in the cache after the step."""
        return self.start + self.count

    @property
    def decode(self) -> bool:
        """Whether the request decodes; otherwise it reads a piece of its prompt."""
        return self.request_pass.kind != PROMPT


@dataclass(slots=True)
class Plan:
    """The plan of one step: the scheduled requests, and the slots freed since the last step."""

    entries: list[Entry]
    freed: list[int]
