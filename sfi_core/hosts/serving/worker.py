"""The worker's side: a `Run` over a server's paged cache, which has the state of slots and their selections.

`rows.RowLaunch` attends with the batch's own decoding rows, the server with prompts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NoReturn

import torch

from sfi_core.engine.attend import end_prompts, prepare_layers
from sfi_core.engine.batch_pass import known_requests
from sfi_core.engine.ledger import RequestPass
from sfi_core.engine.loop import forget, open_row
from sfi_core.engine.run import Run
from sfi_core.errors import BackendError
from sfi_core.hosts.serving.plan import NO_SLOT, Entry, Plan
from sfi_core.hosts.serving.rows import PADDING, RowLaunch
from sfi_core.state.kv_cache import PagedView
from sfi_core.state.layer_pages import LayerPages
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import SLOW, StepRequest, sent


class BorrowedPages(PagedView):
    """Views of the blocks of a server's cache, with our own key norms: those of a slot up to its last selection."""

    def __init__(self, backend: str, page_size: int, slots: int, capacity: int, device: torch.device) -> None:
        """View no layer yet; `capacity` are the tokens that a request may reach."""
        table_BP = torch.zeros(slots, -(-capacity // page_size), dtype=torch.int32, device=device)
        super().__init__(backend, page_size, table_BP)
        self._normed, self._device = [0] * slots, device
        self._needed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # page and place of new tokens, by layer

    def borrow(
        self, layer: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, norm_X: torch.Tensor | None = None
    ) -> None:
        """View a layer's keys and values, of any strides; add norms, in the float32 room `norm_X` if that is enough."""
        shape = key_PHND.shape[:3]
        if norm_X is None or norm_X.numel() < shape.numel():
            norm_X = torch.empty(shape.numel(), dtype=torch.float32, device=key_PHND.device)
        norm_PHN = norm_X[: shape.numel()].view(shape).zero_()
        self.layers[layer] = LayerPages(key_PHND, value_PHNE, norm_PHN)

    def open(self, slot: int) -> None:
        """Forget which norms a slot has: it gets another request."""
        self._normed[slot] = 0

    def need_norms(self, lengths: Mapping[int, int], layers: Iterable[int]) -> None:
        """Say up to which lengths, by slot, selections need the norms of some layers' keys."""
        spans = [(slot, torch.arange(self._normed[slot], length)) for slot, length in lengths.items()]
        for slot, length in lengths.items():
            self._normed[slot] = length
        slot_X = torch.cat([torch.full_like(token_T, slot) for slot, token_T in spans])
        slot_X, token_X = sent(torch.stack([slot_X, torch.cat([token_T for _, token_T in spans])]), self._device)
        places = self.block_table_BP[slot_X, token_X // self.page_size].long(), token_X % self.page_size
        self._needed.update(dict.fromkeys(layers, places))

    def note_norms(self, *layers: int) -> None:
        """Compute the norms that are needed of some layers, once; of all by default."""
        for layer in layers or [*self._needed]:
            if layer in self._needed:
                (page_X, place_X), pages = self._needed.pop(layer), self.layers[layer]
                norm_XH = torch.linalg.vector_norm(pages.key_PHND[page_X, :, place_X], dim=-1, dtype=torch.float32)
                pages.norm_PHN[page_X, :, place_X] = norm_XH

    def norms(self, layer: int, page_RHP: torch.Tensor) -> torch.Tensor:
        """See `KVStore`."""
        self.note_norms(layer)
        return super().norms(layer, page_RHP)

    def append(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the server appends, and owns the blocks."""
        raise TypeError("the server writes its own cache")

    grow = append


class WorkerEngine:
    """The engine of one worker process over the server's cache, `store`.

    `run` has all decoding requests; a prompt under way has a run of its own over its slot. `rows` are the batch's in
    the pass under way, each one's first token in the batch and its entry; None in a dummy pass. The first `launched`
    ones, of a token each, padding included, are the launch's; the server's own attention computes the others.
    """

    def __init__(self, run: Run, store: BorrowedPages, launch: RowLaunch, split: int = 1) -> None:
        """Take a run over the server's cache, with all layers known; a block of the scheduler's is `split` pages."""
        self.run, self.store, self.launch, self.split = run, store, launch, split
        run.requests = [RequestState(request=-1, finished=True) for _ in run.requests]
        self._reading: dict[int, Run] = {}
        self.rows: Sequence[tuple[int, Entry]] | None = None
        self.launched = 0
        # by the builder of attention's metadata: enters the pass that it was made for, once the plan is known
        self.built: dict[Any, Callable[[WorkerEngine, Sequence[Entry]], None]] = {}

    def begin(self, plan: Plan) -> None:
        """Take the scheduler's plan of the pass whose metadata has been built, and enter it."""
        self.rows = None
        for slot in plan.freed:
            forget(self.run, slot)
            self.run.requests[slot] = RequestState(request=-1, finished=True)
            self._reading.pop(slot, None)
        built, self.built = self.built, {}
        if plan.entries and not built:
            raise BackendError("the model runner must build attention's metadata before it binds the plan, for sfi")
        for enter in built.values() if plan.entries else ():
            enter(self, plan.entries)

    def enter(self, rows: Sequence[tuple[int, Entry]], table_RP: torch.Tensor, padded: int = 0) -> None:
        """Enter the pass of the batch's rows, unless it has been. `table_RP` are the rows' blocks, int32.

        A batch that a graph may hold, of a token each, is `padded` to so many rows; 0 for another batch.
        """
        if self.rows is not None:
            return
        slotted, run = [(place, e) for place, (_, e) in enumerate(rows) if e.slot != NO_SLOT], self.run
        # the launch reads the server's table; what selects or learns, and prompts, do so by slot
        every = bool(run.kept or run.watchers)
        self._copy_table([(place, e) for place, e in slotted if every or e.selects or not e.decode], table_RP)
        for _, entry in slotted:
            if not entry.decode:
                self._read(entry)
        if lengths := {e.slot: e.length for _, e in slotted if e.selects}:
            self.store.need_norms(lengths, run.segments)
        if decoding := {e.slot: e.request_pass for _, e in slotted if e.decode}:
            run.begin([decoding.get(slot, RequestPass()) for slot in range(self.store.batch)])
            prepare_layers(run, run.batch_pass.fast, run.requests)
        self.rows, self.launched = rows, padded or sum(1 for _ in takewhile(lambda row: row[1].count == 1, rows))
        if self.launched:
            entries = [entry for _, entry in rows[: self.launched]]
            more = self.launched - len(entries)
            requests = [*map(self._request, entries), *[PADDING] * more]
            self.launch.describe(requests, [*(e.slot for e in entries), *[NO_SLOT] * more])

    def _copy_table(self, rows: Sequence[tuple[int, Entry]], table_RP: torch.Tensor) -> None:
        if rows:
            used = -(-max(entry.length for _, entry in rows) // self.store.page_size)
            row_R, slot_R = sent(torch.tensor([(place, e.slot) for place, e in rows]).T, table_RP.device)
            self.store.block_table_BP[slot_R, :used] = table_RP[row_R, :used].int()

    def _request(self, entry: Entry) -> StepRequest:
        # a row of the launch: as its slot's state says, or dense, a prompt's token too
        if entry.decode and entry.slot != NO_SLOT:
            (known,), _ = known_requests([entry.request_pass], [self.run.requests[entry.slot]], self.run.policy)
            return replace(known, slot=entry.slot, wanted=entry.selects)
        length = entry.length
        return StepRequest(mode=SLOW, length=length, recent_start=length, packed=0, sink=0, slot=NO_SLOT, wanted=False)

    def attend(
        self, layer: int, query_XHGD: torch.Tensor, out_XHGE: torch.Tensor, table_RP: torch.Tensor, **options: Any
    ) -> None:
        """Attend with the pass's decoding rows, and select for prompts, whose outputs are already set.

        Queries by KV head, `options` of `Layer`. In a dummy pass no row has work, as where a graph is recorded in one.
        """
        if self.rows is None or self.launched:
            self.launch.attend(layer, query_XHGD, out_XHGE, table_RP, **options)
        for first, entry in (self.rows or ())[self.launched :]:
            if entry.slot != NO_SLOT:
                tokens = slice(first, first + entry.count)
                query, out = (x[tokens].permute(1, 2, 0, 3)[None] for x in (query_XHGD, out_XHGE))
                end_prompts(self._reading[entry.slot], layer, query, out, **options)

    def leave(self) -> None:
        """Leave the pass, after the model."""
        rows, self.rows = self.rows, None
        if rows is None:
            return
        slotted = [(place, entry) for place, (_, entry) in enumerate(rows) if entry.slot != NO_SLOT]
        if decoding := [entry for _, entry in slotted if entry.decode]:
            self.launch.finish()
            self.launch.refresh([entry.slot for entry in decoding if entry.selects])
            self.run.end_pass()
        for place, entry in slotted:
            if not entry.decode:
                reading = self._reading[entry.slot]
                if place < self.launched:  # a piece of a single token
                    self.launch.end_prompt(reading, entry.slot)
                reading.end_pass()
                if entry.request_pass.ends_prompt:
                    self.run.step = self._reading.pop(entry.slot).step
        self.store.note_norms()

    def _read(self, entry: Entry) -> None:
        if entry.opens:
            self.store.open(entry.slot)
            tokens = [-1] * entry.generated  # only how many there are counts here
            state = RequestState(request=entry.request, length=entry.start, step=entry.step - 1, tokens=tokens)
            self._reading[entry.slot] = open_row(self.run, entry.slot, state)
            self.run.left.clear()  # a server goes on for ever
        self._reading[entry.slot].begin([entry.request_pass])
