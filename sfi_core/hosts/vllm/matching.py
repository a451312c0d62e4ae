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


def rest_of(common: Any, entered: MatchedPass, build: Callable[[Any], Any]) -> tuple[Any, slice] | None:
    """Return the rows behind the launched ones as a batch of their own, for vLLM's kernel; None for none, or all.

    That is vLLM's metadata, which `build` makes of `common`, the batch's `CommonAttentionMetadata` cut to these rows,
    and their tokens in the batch.
    """
    if not 0 < entered.launched < len(entered.rows):
        return None
    entries, device = [entry for _, entry in entered.rows[entered.launched :]], common.seq_lens.device
    starts = torch.tensor([0, *accumulate(entry.count for entry in entries)], dtype=torch.int32)
    first, rows = entered.rows[entered.launched][0], slice(entered.launched, len(entered.rows))
    count = int(starts[-1])
    tokens = slice(first, first + count)
    rest = common.replace(
        query_start_loc=sent(starts, device),
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[rows],
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[rows],
        num_reqs=len(entries),
        num_actual_tokens=count,
        max_query_len=max(entry.count for entry in entries),
        max_seq_len=max(entry.length for entry in entries),
        block_table_tensor=common.block_table_tensor[rows].contiguous(),
        slot_mapping=common.slot_mapping[tokens],
        # what no backend reads of a part: whose rows would be wrong is left out
        positions=None, is_prefilling=None, req_idx=None, logits_indices_padded=None,
        mm_req_doc_ranges=None, rswa_prefix_lens=None,
        _num_computed_tokens_cache=None, _token_to_req_indices_cache=None,
    )  # fmt: skip
    return build(rest), tokens
