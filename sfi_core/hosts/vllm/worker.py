"""The worker's side: a `Run` over vLLM's paged cache, whose rows are slots, not rows of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from sfi_core.engine.attend import attend, end_prompts
from sfi_core.engine.ledger import RequestPass
from sfi_core.engine.loop import forget, open_row
from sfi_core.engine.run import Run
from sfi_core.hosts.vllm.planner import NO_SLOT, Entry, Plan
from sfi_core.state.kv_cache import PagedView
from sfi_core.state.layer_pages import LayerPages, SegmentShape
from sfi_core.state.request import RequestState
from sfi_kernels.code_scan import BatchCodes
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
        """View a layer's keys and values, [blocks, KV heads, tokens, width] of any strides, and add norms.

        `norm_X` is float32 room for the norms; a missing or too small one is replaced.
        """
        shape = key_PHND.shape[:3]
        if norm_X is None or norm_X.numel() < shape.numel():
            norm_X = torch.empty(shape.numel(), dtype=torch.float32, device=key_PHND.device)
        norm_PHN = norm_X[: shape.numel()].view(shape).zero_()
        self.layers[layer] = LayerPages(key_PHND, value_PHNE, norm_PHN)

    def note_norms(self, layer: int, key_XHD: torch.Tensor, place_X: torch.Tensor) -> None:
        """Store the norms of keys that vLLM has just written.

        `place_X` has block number * block size + token of each key; -1 for padding.
        """
        norm_PHN, N = self.layers[layer].norm_PHN, self.page_size
        norm_XH = torch.linalg.vector_norm(key_XHD, dim=-1, dtype=torch.float32)
        # padding goes to block 0, which vLLM gives to nobody
        place_X = place_X[: len(key_XHD)].clamp_min(0)
        norm_PHN[place_X // N, :, place_X % N] = norm_XH[: len(place_X)]

    def grow(self, capacity: int) -> None:
        """Raise `ValueError` beyond vLLM's `max_model_len`: the cache cannot grow."""
        if capacity > self.capacity:
            raise ValueError(f"cache holds {self.capacity} tokens a request, got {capacity}")

    def append(self, layer: int, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: vLLM appends."""
        raise TypeError("vLLM writes its own cache")

    def copy(self) -> NoReturn:
        """Refuse: vLLM owns the blocks."""
        raise TypeError("vLLM owns its own cache")


def codes_of(shape: SegmentShape, slots: int, query_heads: int, longest: int) -> BatchCodes:
    """Allocate a layer's codes for requests of at most `longest` tokens."""
    key, value = (
        torch.empty(0, shape.heads, 1, width, dtype=shape.dtype, device=shape.device)
        for width in (shape.key_width, shape.value_width)
    )
    return BatchCodes.empty(slots, query_heads // shape.heads, key, value, longest)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of vLLM's batch: its first token in the batch and its number of tokens.

    `length` are the tokens in the cache, these included; `block` is the last token's.
    """

    first: int
    count: int
    length: int
    block: int


@dataclass(frozen=True, slots=True)
class MatchedPass:
    """The forward pass under way, matched with vLLM's batch.

    `rows` are the batch's with their entries; `whole` those that vLLM's own attention computes: prompts, and
    requests without a slot. `slot_R` are the slots of the other rows, `token_R` their tokens in the batch.
    """

    rows: tuple[tuple[Row, Entry], ...]
    whole: tuple[int, ...]
    slot_R: torch.Tensor
    token_R: torch.Tensor

    @property
    def prompts(self) -> list[tuple[Row, Entry]]:
        """Rows that read a piece of a prompt into a slot."""
        return [(r, e) for r, e in self.rows if not e.decode and e.slot != NO_SLOT]


class WorkerEngine:
    """The engine of one worker process.

    `run` has all decoding rows; a prompt under way has a run of its own over its slot. `store` is vLLM's
    cache. `plan` is the scheduler's of the forward pass under way, None in dummy passes; `entered` the pass,
    once a layer has entered it.
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

    def enter(self, rows: Sequence[Row], table_RP: torch.Tensor) -> MatchedPass:
        """Match the batch's rows with the plan's entries and enter the pass; later calls return it.

        `table_RP` are the rows' blocks, int32.
        """
        assert self.plan is not None, "the scheduler has planned the pass"
        if self.entered is not None:
            return self.entered
        by_block = {entry.block: entry for entry in self.plan.entries}
        pairs = tuple((row, by_block[row.block]) for row in rows)
        for row, entry in pairs:
            assert (entry.start + entry.count, entry.count) == (row.length, row.count), (row, entry)
        self._take_tables(pairs, table_RP)
        decoding = {e.slot: e.request_pass for _, e in pairs if e.decode and e.slot != NO_SLOT}
        for _, entry in pairs:
            if not entry.decode and entry.slot != NO_SLOT:
                self._read(entry)
        if decoding:
            slots = range(self.store.batch)
            self.run.begin([decoding.get(slot, RequestPass()) for slot in slots])
        at = [(e.slot, row.first) for row, e in pairs if e.decode and e.slot != NO_SLOT]
        slot_R, token_R = sent(torch.tensor(at, dtype=torch.int64).view(-1, 2).T, table_RP.device)
        whole = [p for p, (_, e) in enumerate(pairs) if not e.decode or e.slot == NO_SLOT]
        self.entered = MatchedPass(pairs, tuple(whole), slot_R, token_R)
        return self.entered

    def attend(self, layer: int, query_XHGD: torch.Tensor, out_XHGE: torch.Tensor, **options: Any) -> None:
        """Attend with the pass's decoding rows, and select for prompts that vLLM has attended with.

        Queries are grouped by KV head; the outputs of `MatchedPass.whole` are already set. `options` are
        `scale`, `soft_cap` and `sink_HG` of `engine.layer.Layer`.
        """
        entered = self.entered
        assert entered is not None, "the pass has been entered"
        if len(entered.slot_R):
            query_BHGD = query_XHGD.new_zeros(self.store.batch, *query_XHGD.shape[1:])
            query_BHGD.index_copy_(0, entered.slot_R, query_XHGD.index_select(0, entered.token_R))
            out_BHGE = attend(self.run, layer, query_BHGD.unsqueeze(3), **options)[:, :, :, 0]
            out_XHGE.index_copy_(0, entered.token_R, out_BHGE.index_select(0, entered.slot_R))
        for row, entry in entered.prompts:
            tokens = slice(row.first, row.first + row.count)
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
            state = RequestState(
                request=entry.request,
                length=entry.start,
                step=entry.step - 1,
                tokens=[-1] * entry.generated,  # only how many there are counts here
            )
            self._reading[entry.slot] = open_row(self.run, entry.slot, state)
            self.run.left.clear()  # a server goes on for ever
        self._reading[entry.slot].begin([entry.request_pass])

    def _take_tables(self, pairs: Sequence[tuple[Row, Entry]], table_RP: torch.Tensor) -> None:
        places = [(place, e.slot) for place, (_, e) in enumerate(pairs) if e.slot != NO_SLOT]
        if not places:
            return
        longest = max(row.length for row, _ in pairs)
        used = -(-longest // self.store.page_size)
        row_R, slot_R = sent(torch.tensor(places).T, table_RP.device)
        self.store.block_table_BP[slot_R, :used] = table_RP[row_R, :used].int()
