"""The part of a batch that vLLM's own kernel computes: prompts, and requests without a slot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sfi_core.hosts.vllm.worker import MatchedPass
from sfi_kernels.step_descriptor import sent


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


def part_of(common: Any, one: MatchedPass, build: Callable[[Any], Any]) -> Part | None:
    """Return the rows that vLLM's kernel computes; None for no rows, or all.

    Decoding rows come first, so that the part's are adjacent unless a decoding request has no slot. `common`
    is the batch's `CommonAttentionMetadata`; `build` makes vLLM's metadata from the part's.
    """
    if not one.whole or len(one.whole) == len(one.rows):
        return None
    rows, device = [one.rows[place][0] for place in one.whole], common.seq_lens.device
    start = [0]
    for row in rows:
        start.append(start[-1] + row.count)
    together = one.whole[-1] - one.whole[0] + 1 == len(one.whole)
    if together:
        row_R: Any = slice(one.whole[0], one.whole[-1] + 1)
        own_R: Any = row_R
        tokens: Any = slice(rows[0].first, rows[-1].first + rows[-1].count)
    else:
        own_R = torch.tensor(one.whole)
        row_R = sent(own_R, device)
        places = [torch.arange(row.first, row.first + row.count) for row in rows]
        tokens = sent(torch.cat(places), device)
    start_cpu = torch.tensor(start, dtype=torch.int32)
    part = common.replace(
        query_start_loc=sent(start_cpu, device),
        query_start_loc_cpu=start_cpu,
        seq_lens=common.seq_lens[row_R],
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[own_R],
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
