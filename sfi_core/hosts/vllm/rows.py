"""Match the rows of vLLM's batch with the plan's entries, mostly without waiting for the device.

A pass's metadata has each row's first query and cached tokens on the host (`query_start_loc_cpu`, and
`seq_lens_cpu_upper_bound`, exact without speculative decoding); the second model runner adds each row's
number in its table (`req_idx`). A row with unique counts is known by them, others by their number once it has
been seen. The rest are told apart by the block of their last token, one read of the device: the second runner
needs it when requests of one length begin together, the first in every pass in which rows share their counts.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sfi_core.hosts.vllm.planner import Entry
from sfi_core.hosts.vllm.worker import MatchedPass, Row
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

    def match(self, rows: HostRows, entries: Sequence[Entry], read_blocks: Callable[[], Sequence[int]]) -> list[Row]:
        """Return the rows, each with its entry's block; there are as many `entries` as rows.

        `read_blocks` reads the block of each row's last token from the device.
        """
        same = defaultdict(list)
        for entry in entries:
            same[entry.start + entry.count, entry.count].append(entry)
        counts = rows.count
        matched = [
            self._known(same[length, count], rows.number[place] if rows.number else None)
            for place, (length, count) in enumerate(zip(rows.length, counts, strict=False))
        ]
        if None in matched:
            block_R, by_block = read_blocks(), {entry.block: entry for entry in entries}
            matched = [entry or by_block[block] for entry, block in zip(matched, block_R, strict=True)]
        entered = [entry for entry in matched if entry is not None]
        # a request that loses its number is absent for a pass at least, so one pass is memory enough
        self._request_of = {number: entry.request for number, entry in zip(rows.number or (), entered, strict=False)}
        return [
            Row(rows.start[place], counts[place], rows.length[place], entry.block)
            for place, entry in enumerate(entered)
        ]

    def _known(self, same: Sequence[Entry], number: int | None) -> Entry | None:
        if len(same) == 1:
            return same[0]
        request = None if number is None else self._request_of.get(number)
        return next((entry for entry in same if entry.request == request), None)


def last_blocks(table_RP: torch.Tensor, rows: HostRows, page_size: int, split: int) -> list[int]:
    """Read the block of each row's last token from the device: the one wait of a pass; it is `split` pages."""
    last = [(rows.length[place] - 1) // page_size for place in range(len(rows.count))]
    column_R1 = sent(torch.tensor(last, dtype=torch.int64)[:, None], table_RP.device)
    blocks: list[int] = table_RP[: len(last)].gather(1, column_R1)[:, 0].div(split, rounding_mode="floor").tolist()
    return blocks


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a batch, as a batch of their own with vLLM's metadata.

    `tokens` are the part's in the batch: a slice where they are adjacent, else their places.
    """

    metadata: Any
    tokens: slice | torch.Tensor

    def take(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the part's rows of tensors with one row a token."""
        return tuple(tensor[self.tokens] for tensor in tensors)

    def room(self, output: torch.Tensor) -> torch.Tensor:
        """Return the tensor for the part's outputs: a view of the batch's rows, or a new one."""
        if isinstance(self.tokens, slice):
            return output[self.tokens]
        return output.new_empty(len(self.tokens), *output.shape[1:])

    def put(self, out: torch.Tensor, output: torch.Tensor) -> None:
        """Copy the part's outputs into the batch's, unless they are a view."""
        if not isinstance(self.tokens, slice):
            output[self.tokens] = out


def part_of(common: Any, entered: MatchedPass, build: Callable[[Any], Any]) -> Part | None:
    """Return the rows that vLLM's kernel computes; None for no rows, or all.

    Decoding rows come first, so that the part's are adjacent unless a decoding request has no slot. `common`
    is the batch's `CommonAttentionMetadata`; `build` makes vLLM's metadata from the part's.
    """
    if not entered.whole or len(entered.whole) == len(entered.rows):
        return None
    rows, device = [entered.rows[place][0] for place in entered.whole], common.seq_lens.device
    start = [0]
    for row in rows:
        start.append(start[-1] + row.count)
    together = entered.whole[-1] - entered.whole[0] + 1 == len(entered.whole)
    if together:
        row_R: Any = slice(entered.whole[0], entered.whole[-1] + 1)
        host_row_R: Any = row_R
        tokens: Any = slice(rows[0].first, rows[-1].first + rows[-1].count)
    else:
        host_row_R = torch.tensor(entered.whole)
        row_R = sent(host_row_R, device)
        places = [torch.arange(row.first, row.first + row.count) for row in rows]
        tokens = sent(torch.cat(places), device)
    start_cpu = torch.tensor(start, dtype=torch.int32)
    part = common.replace(
        query_start_loc=sent(start_cpu, device),
        query_start_loc_cpu=start_cpu,
        seq_lens=common.seq_lens[row_R],
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[host_row_R],
        num_reqs=len(rows),
        num_actual_tokens=start[-1],
        max_query_len=max(row.count for row in rows),
        max_seq_len=max(row.length for row in rows),
        block_table_tensor=common.block_table_tensor[row_R].contiguous(),
        slot_mapping=common.slot_mapping[tokens],
        # what no backend reads of a part: whose rows would be wrong is left out
        positions=None, is_prefilling=None, req_idx=None, logits_indices_padded=None,
        mm_req_doc_ranges=None, rswa_prefix_lens=None,
        _num_computed_tokens_cache=None, _token_to_req_indices_cache=None,
    )  # fmt: skip
    return Part(build(part), tokens)
