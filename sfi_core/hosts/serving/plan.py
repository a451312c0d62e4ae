"""The plan of an engine step, which a scheduler sends to its workers, and which row of a batch is which entry."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sfi_core.engine.ledger import RequestPass
from sfi_kernels.step_descriptor import PROMPT, sent

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


class RowMatcher:
    """Matches the rows of the engine's batch with the plan's entries, mostly without waiting for the device.

    A row with unique counts of new and cached tokens is known by them; the second model runner adds the rows' numbers
    in its table, by which others are known once they have been seen. The rest are told apart by the block of their
    last token, one read of the device: the second runner needs it when requests of one length begin together, the
    first in every pass in which rows share their counts.
    """

    def __init__(self) -> None:
        self._request_of: dict[int, int] = {}

    def match(
        self,
        counts: Sequence[tuple[int, int]],
        numbers: Sequence[int] | None,
        entries: Sequence[Entry],
        read_blocks: Callable[[], Sequence[int]],
    ) -> list[Entry]:
        """Return each row's entry, by its counts of cached and new tokens, its number, or its last token's block."""
        alike = defaultdict(list)
        for entry in entries:
            alike[entry.length, entry.count].append(entry)
        matched: list[Entry] = []
        blocks: Sequence[int] = ()
        for row, count in enumerate(counts):
            same = alike[count]
            request = self._request_of.get(numbers[row]) if numbers else None
            fitting = same if len(same) == 1 else [entry for entry in same if entry.request == request]
            if not fitting:
                blocks = blocks or read_blocks()
                fitting = [entry for entry in same if entry.block == blocks[row]]
            matched += fitting
        # a request that loses its number is absent for a pass at least, so one pass is memory enough
        self._request_of = {number: e.request for number, e in zip(numbers or (), matched, strict=False)}
        return matched


def last_blocks(table_RP: torch.Tensor, lengths: Sequence[int], page_size: int, split: int) -> list[int]:
    """Read the block of each row's last token from the device: the one wait of a pass; it is `split` pages."""
    column_R = sent(torch.tensor([(length - 1) // page_size for length in lengths]), table_RP.device)
    page_R1 = table_RP[: len(lengths)].gather(1, column_R[:, None])
    blocks: list[int] = page_R1[:, 0].div(split, rounding_mode="floor").tolist()
    return blocks
