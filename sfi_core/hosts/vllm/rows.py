"""Match the rows of vLLM's batch with the plan's entries, mostly without waiting for the device.

The metadata of a pass has host copies of each row's first query and cached tokens
(`CommonAttentionMetadata.query_start_loc_cpu` and `seq_lens_cpu_upper_bound`, which is exact without
speculative decoding), and from the second model runner each row's number in the runner's table (`req_idx`).
The plan has both counts too. A row with unique counts is known by them; others are known by their number,
once it has been seen. What is left is told apart by the block of its last token, which is one read of the
device: the second runner needs it when requests of one length begin together, the first one in every pass in
which rows share their counts.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sfi_core.hosts.vllm.entry import Entry
from sfi_core.hosts.vllm.worker import Row
from sfi_kernels.step_descriptor import sent


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the host knows of a batch's rows.

    `start` has each row's first query in the batch, and the end of the last row's; `length` the tokens in the
    cache, the new ones included; `number` the requests' in the model runner's table, None where the runner
    does not say.
    """

    start: Sequence[int]
    length: Sequence[int]
    number: Sequence[int] | None = None

    @property
    def count(self) -> list[int]:
        """New tokens of each row, without the rows of no tokens that pad the batch at the end."""
        counts = [stop - start for start, stop in zip(self.start, self.start[1:], strict=False)]
        return counts[: counts.index(0)] if 0 in counts else counts


class RowMatcher:
    """Matches the rows of one pass after another."""

    def __init__(self) -> None:
        self._request_of: dict[int, int] = {}

    def match(
        self, rows: HostRows, entries: Sequence[Entry], read_blocks: Callable[[], Sequence[int]]
    ) -> list[Row]:
        """Return the rows, each with its entry's block; there are as many `entries` as rows.

        `read_blocks` reads the block of each row's last token from the device.
        """
        same = defaultdict(list)
        for entry in entries:
            same[entry.start + entry.count, entry.count].append(entry)
        counts = rows.count
        found = [
            self._known(same[length, count], rows.number[place] if rows.number else None)
            for place, (length, count) in enumerate(zip(rows.length, counts, strict=False))
        ]
        if None in found:
            block_R, by_block = read_blocks(), {entry.block: entry for entry in entries}
            found = [entry or by_block[block] for entry, block in zip(found, block_R, strict=True)]
        entered = [entry for entry in found if entry is not None]
        # a request that loses its number is absent for a pass at least, so one pass is memory enough
        self._request_of = {
            number: entry.request for number, entry in zip(rows.number or (), entered, strict=False)
        }
        return [
            Row(rows.start[place], counts[place], rows.length[place], entry.block)
            for place, entry in enumerate(entered)
        ]

    def _known(self, same: Sequence[Entry], number: int | None) -> Entry | None:
        if len(same) == 1:
            return same[0]
        request = None if number is None else self._request_of.get(number)
        return next((entry for entry in same if entry.request == request), None)


def last_blocks(table_RP: torch.Tensor, rows: HostRows, page_size: int) -> list[int]:
    """Read the block of each row's last token from the device: the one wait of a pass."""
    last = [(rows.length[place] - 1) // page_size for place in range(len(rows.count))]
    column_R1 = sent(torch.tensor(last, dtype=torch.int64)[:, None], table_RP.device)
    blocks: list[int] = table_RP[: len(last)].gather(1, column_R1)[:, 0].tolist()
    return blocks
