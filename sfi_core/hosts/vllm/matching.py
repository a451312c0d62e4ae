"""Which row of vLLM's batch is which entry of the plan, and the rows that vLLM's own attention computes."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from sfi_core.hosts.vllm.plan import Entry
from sfi_core.hosts.vllm.worker import MatchedPass
from sfi_kernels.step_descriptor import sent


class RowMatcher:
    """Matches the rows of vLLM's batch with the plan's entries, mostly without waiting for the device.

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


def part_of(common: Any, entered: MatchedPass, build: Callable[[Any], Any]) -> tuple[Any, slice | torch.Tensor] | None:
    """Return the rows that vLLM's kernel computes as a batch of their own; None for no rows, or all.

    That is vLLM's metadata, which `build` makes of `common`, the batch's `CommonAttentionMetadata` cut to the part;
    and the part's tokens in the batch: a slice where they are adjacent, else their places. Decoding rows come first,
    so that they are adjacent unless a decoding request has no slot.
    """
    if not entered.whole or len(entered.whole) == len(entered.rows):
        return None
    rows, device = [entered.rows[place] for place in entered.whole], common.seq_lens.device
    starts = [0, *accumulate(entry.count for _, entry in rows)]
    if entered.whole[-1] - entered.whole[0] + 1 == len(entered.whole):
        row_R: Any = slice(entered.whole[0], entered.whole[-1] + 1)
        host_row_R: Any = row_R
        tokens: Any = slice(rows[0][0], rows[0][0] + starts[-1])
    else:
        host_row_R = torch.tensor(entered.whole)
        row_R = sent(host_row_R, device)
        tokens = sent(torch.cat([torch.arange(first, first + entry.count) for first, entry in rows]), device)
    start_cpu = torch.tensor(starts, dtype=torch.int32)
    part = common.replace(
        query_start_loc=sent(start_cpu, device),
        query_start_loc_cpu=start_cpu,
        seq_lens=common.seq_lens[row_R],
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[host_row_R],
        num_reqs=len(rows),
        num_actual_tokens=starts[-1],
        max_query_len=max(entry.count for _, entry in rows),
        max_seq_len=max(entry.length for _, entry in rows),
        block_table_tensor=common.block_table_tensor[row_R].contiguous(),
        slot_mapping=common.slot_mapping[tokens],
        # what no backend reads of a part: whose rows would be wrong is left out
        positions=None, is_prefilling=None, req_idx=None, logits_indices_padded=None,
        mm_req_doc_ranges=None, rswa_prefix_lens=None,
        _num_computed_tokens_cache=None, _token_to_req_indices_cache=None,
    )  # fmt: skip
    return build(part), tokens
