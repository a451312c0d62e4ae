"""The worker's side: a `Run` over vLLM's paged cache, whose rows are slots, not rows of the batch."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch

from sfi_core.engine.attend import attend, end_prompts
from sfi_core.engine.ledger import RequestPass
from sfi_core.engine.loop import forget, open_row
from sfi_core.engine.run import Run
from sfi_core.hosts.vllm.planner import NO_SLOT, Entry, Plan
from sfi_core.policies.base import Policy
from sfi_core.state.kv_cache import PagedView
from sfi_core.state.layer_pages import LayerPages, SegmentShape
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import sent


class BorrowedPages(PagedView):
    """Views of the blocks of vLLM's cache, with our own key norms."""

    def __init__(self, backend: str, page_size: int, slots: int, capacity: int, device: torch.device) -> None:
        """View no layer yet; `capacity` are the tokens that a request may reach."""
        table_BP = torch.zeros(slots, -(-capacity // page_size), dtype=torch.int32, device=device)
        super().__init__(backend, page_size, table_BP)

    def borrow(
        self, layer: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, norm_X: torch.Tensor | None = None
    ) -> None:
        """View a layer's keys and values, of any strides; add norms, in the float32 room `norm_X` if that is enough."""
        shape = key_PHND.shape[:3]
        if norm_X is None or norm_X.numel() < shape.numel():
            norm_X = torch.empty(shape.numel(), dtype=torch.float32, device=key_PHND.device)
        norm_PHN = norm_X[: shape.numel()].view(shape).zero_()
        self.layers[layer] = LayerPages(key_PHND, value_PHNE, norm_PHN)

    def note_norms(self, layer: int, key_XHD: torch.Tensor, place_X: torch.Tensor) -> None:
        """Store the norms of keys that vLLM has just written, at block * block size + token; -1 for padding."""
        norm_PHN, N = self.layers[layer].norm_PHN, self.page_size
        norm_XH = torch.linalg.vector_norm(key_XHD, dim=-1, dtype=torch.float32)
        # padding goes to block 0, which vLLM gives to nobody
        place_X = place_X[: len(key_XHD)].clamp_min(0)
        norm_PHN[place_X // N, :, place_X % N] = norm_XH[: len(place_X)]

    def grow(self, capacity: int) -> None:
        """Raise `ValueError` beyond vLLM's `max_model_len`: the cache cannot grow."""
        if capacity > self.capacity:
            raise ValueError(f"cache holds {self.capacity} tokens a request, got {capacity}")

    def append(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: vLLM appends, and owns the blocks."""
        raise TypeError("vLLM writes its own cache")

    copy = append


def kept_of(policy: Policy, shape: SegmentShape, slots: int, query_heads: int, longest: int) -> Any:
    """Allocate what a policy keeps of a layer for requests of at most `longest` tokens, if anything."""
    key, value = (
        torch.empty(0, shape.heads, 1, width, dtype=shape.dtype, device=shape.device)
        for width in (shape.key_width, shape.value_width)
    )
    return policy.companion.keeps(slots, query_heads // shape.heads, key, value, longest)


@dataclass(frozen=True, slots=True)
class MatchedPass:
    """The forward pass under way, matched with vLLM's batch.

    `rows` are the batch's: each row's first token in the batch, and its entry. `whole` are the places of those that
    vLLM's own attention computes: prompts, and requests without a slot. `slot_R` are the slots of the other rows,
    `token_R` their tokens in the batch.
    """

    rows: Sequence[tuple[int, Entry]]
    whole: tuple[int, ...]
    slot_R: torch.Tensor
    token_R: torch.Tensor

    @property
    def prompts(self) -> list[tuple[int, Entry]]:
        """Rows that read a piece of a prompt into a slot."""
        return [(first, entry) for first, entry in self.rows if not entry.decode and entry.slot != NO_SLOT]


class WorkerEngine:
    """The engine of one worker process over vLLM's cache, `store`.

    `run` has all decoding rows; a prompt under way has a run of its own over its slot. `plan` is the scheduler's of the
    forward pass under way, None in dummy passes; `entered` the pass, once a layer has entered it.
    """

    def __init__(self, run: Run, store: BorrowedPages, split: int = 1) -> None:
        """Take a run over vLLM's cache, with all layers known; a block of the scheduler's is `split` pages."""
        self.run, self.store, self.split = run, store, split
        run.requests = [RequestState(request=-1, finished=True) for _ in run.requests]
        self._reading: dict[int, Run] = {}
        self.plan: Plan | None = None
        self.entered: MatchedPass | None = None

    def begin(self, plan: Plan) -> None:
        """Take the scheduler's plan of the next pass."""
        self.plan, self.entered = plan, None
        for slot in plan.freed:
            forget(self.run, slot)
            self.run.requests[slot] = RequestState(request=-1, finished=True)
            self._reading.pop(slot, None)

    def enter(self, rows: Sequence[tuple[int, Entry]], table_RP: torch.Tensor) -> MatchedPass:
        """Enter the pass of the batch's rows; later calls return it. `table_RP` are the rows' blocks, int32."""
        if self.entered is not None:
            return self.entered
        slotted = [(place, first, e) for place, (first, e) in enumerate(rows) if e.slot != NO_SLOT]
        if slotted:
            used = -(-max(entry.length for *_, entry in slotted) // self.store.page_size)
            row_R, slot_R = sent(torch.tensor([(place, e.slot) for place, _, e in slotted]).T, table_RP.device)
            self.store.block_table_BP[slot_R, :used] = table_RP[row_R, :used].int()
        for *_, entry in slotted:
            if not entry.decode:
                self._read(entry)
        at = [(e.slot, first) for _, first, e in slotted if e.decode]
        if at:
            decoding = {e.slot: e.request_pass for *_, e in slotted if e.decode}
            self.run.begin([decoding.get(slot, RequestPass()) for slot in range(self.store.batch)])
        slot_R, token_R = sent(torch.tensor(at, dtype=torch.int64).view(-1, 2).T, table_RP.device)
        whole = [place for place, (_, e) in enumerate(rows) if not e.decode or e.slot == NO_SLOT]
        self.entered = MatchedPass(rows, tuple(whole), slot_R, token_R)
        return self.entered

    def attend(self, layer: int, query_XHGD: torch.Tensor, out_XHGE: torch.Tensor, **options: Any) -> None:
        """Attend with the pass's decoding rows, and select for prompts; queries by KV head, `options` of `Layer`.

        The outputs of `MatchedPass.whole` are already set.
        """
        entered = self.entered
        assert entered is not None, "the pass has been entered"
        if len(entered.slot_R):
            query_BHGD = query_XHGD.new_zeros(self.store.batch, *query_XHGD.shape[1:])
            query_BHGD.index_copy_(0, entered.slot_R, query_XHGD.index_select(0, entered.token_R))
            out_BHGE = attend(self.run, layer, query_BHGD.unsqueeze(3), **options)[:, :, :, 0]
            out_XHGE.index_copy_(0, entered.token_R, out_BHGE.index_select(0, entered.slot_R))
        for first, entry in entered.prompts:
            tokens = slice(first, first + entry.count)
            query, out = (x[tokens].permute(1, 2, 0, 3)[None] for x in (query_XHGD, out_XHGE))
            end_prompts(self._reading[entry.slot], layer, query, out, **options)

    def leave(self) -> None:
        """Leave the pass, after vLLM's model."""
        self.plan, entered, self.entered = None, self.entered, None
        if entered is None:
            return
        if len(entered.slot_R):
            self.run.end_pass()
        for _, entry in entered.prompts:
            self._reading[entry.slot].end_pass()
            if entry.request_pass.ends_prompt:
                self.run.step = self._reading.pop(entry.slot).step

    def _read(self, entry: Entry) -> None:
        if entry.opens:
            tokens = [-1] * entry.generated  # only how many there are counts here
            state = RequestState(request=entry.request, length=entry.start, step=entry.step - 1, tokens=tokens)
            self._reading[entry.slot] = open_row(self.run, entry.slot, state)
            self.run.left.clear()  # a server goes on for ever
        self._reading[entry.slot].begin([entry.request_pass])


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
