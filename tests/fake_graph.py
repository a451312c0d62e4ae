"""CUDA graphs without CUDA: what a step asks of the device is put on a tape and played again.

A tape holds every aten op and every Triton launch with the very tensors that it had, and playing it writes
into the same memory. So a number that the step took from the host is on the tape for good, as in a graph,
and what a graph cannot hold is refused: a look at a tensor's values, and values that come from the host.
Calls of other ranks are on the tape too: playing it calls them again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from sfi_core.engine.graphs import recorder
from sfi_core.errors import BackendError
from sfi_core.state.side_stream import SideStream
from sfi_kernels.decode_attention import DecodeAttention, decode_attention, split_plan
from sfi_kernels.dense_attention import dense_attention, window_logits
from sfi_kernels.pack import append, pack, recall
from sfi_kernels.pack.reference import packed_positions
from sfi_kernels.selector import formulas, selector
from sfi_kernels.step_descriptor import FAST, IDLE, LENGTH, MIXED, MODE, PACKED, QUERIES, SLOT, START
from sfi_kernels.top_k import top_k
from sfi_kernels.top_k.reference import without_wait

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,  # noqa: SLF001
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._linalg_eigh.default,  # noqa: SLF001 - looks whether it converged
}
SPLIT = (DTensor, AsyncCollectiveTensor)
FROM_HOST = {aten.lift_fresh.default}
LOOKS = ("item", "tolist", "numpy", "cpu")
MOST = 17  # tokens that a request verifies


class Tape(TorchDispatchMode):
    """Ops and launches in order; `host` allows values from the host, which a copy may bring."""

    def __init__(self, *, host: bool = False) -> None:
        super().__init__()
        self._host = host
        self.played: list[Callable[[], None]] = []
        self.refused: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, SPLIT) for kind in types):
            return NotImplemented  # it works with tensors of its own
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        masks = func is aten.index.Tensor and any(x.dtype == torch.bool for x in given[1:])
        if func in WAITS or masks:
            self.refused.append(f"{func} waits for the device")
        if func in FROM_HOST and not self._host:
            self.refused.append(f"{func} takes values from the host")
        result = func(*args, **kwargs)
        outs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if func.namespace == "c10d":  # it writes to what it is given
            self.played.append(lambda: func(*args, **kwargs)[1].wait())  # noqa: PLW0108 - a call each time
        elif func._schema.is_mutable:  # noqa: SLF001
            self.played.append(lambda: func(*args, **kwargs))
        elif not {memory(x) for x in outs} & {memory(x) for x in given}:  # otherwise a view
            self.played.append(lambda: again(outs, func(*args, **kwargs)))
        return result

    def play(self) -> None:
        for op in self.played:
            op()


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001


def again(outs: list[torch.Tensor], result) -> None:
    news = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    for out, new in zip(outs, news, strict=True):
        out.copy_(torch.ops._c10d_functional.wait_tensor(new))  # noqa: SLF001 - of another rank, perhaps


class FakeRecorder:
    """Does the work once to warm up and once more on a tape; counts `tapes` recorded and `plays`."""

    def __init__(self) -> None:
        self.tapes = self.plays = 0
        self.tape: Tape | None = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        with self.refusing(Tape()) as tape:
            work()
        self.tapes += 1

        def play() -> None:
            self.plays += 1
            tape.play()

        return play

    @contextmanager
    def refusing(self, tape: Tape) -> Iterator[Tape]:
        """Put what is done inside on a tape, and refuse looks at the device, once all is done."""
        self.tape = tape
        try:
            with tape, pytest.MonkeyPatch.context() as patch:
                for name in LOOKS:
                    patch.setattr(torch.Tensor, name, self._refusing(getattr(torch.Tensor, name), name))
                yield tape
        finally:
            self.tape = None
        if tape.refused:
            raise BackendError(tape.refused[0])

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recorder, "can_record", lambda _: True)
        monkeypatch.setattr(recorder, "make_recorder", lambda _: self)
        launched = GridExecutor.__call__

        def launch(executor, *args, **kwargs) -> None:
            tape = self.tape
            if tape is None:
                launched(executor, *args, **kwargs)
                return
            tape.played.append(lambda: launched(executor, *args, **kwargs))
            with self._off():
                launched(executor, *args, **kwargs)

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    @contextmanager
    def _off(self) -> Iterator[None]:
        # the interpreter reads tensors; a GPU would
        tape, self.tape = self.tape, None
        with _disable_current_modes():
            yield
        self.tape = tape

    def _refusing(self, look: Callable, name: str) -> Callable:
        recording = get_ident()

        def refuse(tensor: torch.Tensor, *args, **kwargs):
            # another thread, a trace's writer, may look at its own tensors meanwhile
            if self.tape is not None and get_ident() == recording:
                self.tape.refused.append(f"{name} waits for the device")
            return look(tensor, *args, **kwargs)

        return refuse


class LateSide(SideStream):
    """A side branch on the tape: what a job does is played where the main stream waits for it, never without a wait."""

    def __init__(self, recorder: FakeRecorder) -> None:
        self.late = 0  # jobs that were recorded
        self._recorder, self._played = recorder, dict[int, list[Callable[[], None]]]()

    def run(self, place: int, job: Callable[[], None]) -> None:
        tape = self._recorder.tape
        before = 0 if tape is None else len(tape.played)
        job()
        if tape is not None:
            self.late += 1
            self._played[place] = tape.played[before:]
            del tape.played[before:]

    def wait(self, place: int) -> None:
        if self._recorder.tape is not None:
            self._recorder.tape.played += self._played.pop(place)


def use_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plain tensor functions that never look at the host stand in for the slow ones of the kernels."""
    monkeypatch.setitem(decode_attention.__dict__, "triton", whole_attention)
    monkeypatch.setitem(append.__dict__, "triton", append_few)
    monkeypatch.setitem(pack.__dict__, "triton", pack_by_masks)
    monkeypatch.setitem(recall.__dict__, "triton", recall_by_masks)
    monkeypatch.setitem(split_plan.__dict__, "triton", lambda *_: None)  # nobody reads the work then
    monkeypatch.setattr(formulas, "by_numpy", lambda _: False)
    monkeypatch.setitem(window_logits.__dict__, "triton", whole_logits)
    for op in (dense_attention, selector):
        monkeypatch.setitem(op.__dict__, "triton", op.reference)
    monkeypatch.setitem(
        top_k.__dict__, "triton", lambda score, budget: without_wait(score, min(budget, score.shape[2]))
    )


def append_few(
    key_BHTD, value_BHTE, start_B, count_B, key_PHND, value_PHNE, norm_PHN, table_BP, *, ring=None
) -> None:  # fmt: skip
    """Append tokens of every request that has some, one after the other; a prompt's as the reference does."""
    N, T = key_PHND.shape[2], key_BHTD.shape[2]
    if T > MOST:
        fixed = start_B, count_B, key_PHND, value_PHNE, norm_PHN, table_BP
        append.reference(key_BHTD, value_BHTE, *fixed, ring=ring)
        return
    pages_of = [(table_BP, (key_PHND, value_PHNE, norm_PHN))]
    if ring is not None:
        pages_of.append((ring.block_table_BP, ring[:2]))
    for token in range(T):
        order = token - T + count_B
        position = (start_B + order).clamp(0, table_BP.shape[1] * N - 1)
        news = (key_BHTD[:, :, token], value_BHTE[:, :, token], key_BHTD[:, :, token].norm(dim=-1))
        for numbers_BP, parts in pages_of:
            page, place = numbers_BP.gather(1, (position // N).long()[:, None])[:, 0].long(), (position % N).long()
            for pages, new in zip(parts, news, strict=False):  # a ring has no norms
                has = (order >= 0).view(-1, *[1] * (new.dim() - 1))
                pages[page, :, place] = torch.where(has, new, pages[page, :, place])


def whole_logits(query_BHGWD, key_PHND, table_BP, length_B, *, scale, soft_cap=None, longest=None):
    """Compute one query's logits with every page, or a window's as the reference does."""
    if query_BHGWD.shape[3] > 1:
        options = {"scale": scale, "soft_cap": soft_cap, "longest": longest}
        return window_logits.reference(query_BHGWD, key_PHND, table_BP, length_B, **options)
    key_BHTD = key_PHND[table_BP.long()].transpose(1, 2).flatten(2, 3)[:, :, :longest]
    behind_BT = torch.arange(key_BHTD.shape[2]) >= length_B[:, None]
    key_BHTD = key_BHTD.masked_fill(behind_BT[:, None, :, None], 0.0)
    logits = capped(torch.einsum("bhgwd,bhtd->bhgwt", query_BHGWD, key_BHTD) * scale, soft_cap)
    return logits.masked_fill(behind_BT[:, None, None, None], torch.nan)  # undefined


def capped(logits, soft_cap):
    """Return logits under a soft cap, if there is one."""
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def pack_by_masks(
    key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R, key_BHSD, value_BHSE, position_BHS,
    length_BH, *, heads_RH=None,
) -> None:  # fmt: skip
    """Pack the requests that `request_R` names, in the heads that are marked; a row of padding names none."""
    B, H, S, _ = key_BHSD.shape
    match_BR = request_R == torch.arange(B)[:, None]
    has, source_B = match_BR.any(1)[:, None].expand(B, H), match_BR.int().argmax(1)
    has = has if heads_RH is None else has & (heads_RH != 0)[source_B]
    chosen_BHS = packed_positions(index_RHK, sink_R, S)[source_B]
    # what is chosen for other rows is undefined
    token, N = torch.where(has[..., None], chosen_BHS, 0).clamp_min(0).long(), key_PHND.shape[2]
    page = block_table_BP[:, None].expand(B, H, -1).gather(2, token // N).long()
    for pages, packed in ((key_PHND, key_BHSD), (value_PHNE, value_BHSE)):
        rows = pages[page, torch.arange(H)[:, None], token % N]
        packed.copy_(torch.where(has[:, :, None, None], rows, packed))
    position_BHS.copy_(torch.where(has[:, :, None], chosen_BHS, position_BHS))
    length_BH.copy_(torch.where(has, (chosen_BHS >= 0).sum(2, dtype=torch.int32), length_BH))


def recall_by_masks(
    key_PHND, value_PHNE, table_BP, request_R, index_RHK, sink_R, old_key, old_value, old_position_RHS, old_length_RH,
    *segment_and_fetched, heads_RH=None,
) -> None:  # fmt: skip
    """Pack from the host's pages, and count the rows that the old segment lacks."""
    *segment, fetched_RH = segment_and_fetched
    pack_by_masks(key_PHND, value_PHNE, table_BP, request_R, index_RHK, sink_R, *segment, heads_RH=heads_RH)
    wanted_RHS = packed_positions(index_RHK, sink_R, old_position_RHS.shape[2])
    counts_RHS = torch.arange(old_position_RHS.shape[2]) < old_length_RH[..., None]
    known = ((wanted_RHS[..., None] == old_position_RHS[:, :, None]) & counts_RHS[:, :, None]).any(-1)
    missing_RH = ((wanted_RHS >= 0) & ~known).sum(2, dtype=torch.int32)
    asked_RH = (request_R >= 0)[:, None].expand_as(missing_RH)
    asked_RH = asked_RH if heads_RH is None else asked_RH & (heads_RH != 0)
    fetched_RH.copy_(torch.where(asked_RH, missing_RH, 0))


def whole_attention(
    query_BHGWD, packed_key_BHSD, packed_value_BHSE, packed_length_BH, key_PHND, value_PHNE, table_BP, step,
    *, scale, soft_cap=None, sink_HG=None, evidence=False, into=None, out=None, dense_BH=None,
    pseudo=None, position_BHS=None, ring=None,
):  # fmt: skip
    """Attend to every page and packed row, with masks: lengths and modes are read where they lie."""
    W, words = query_BHGWD.shape[3], step.table_BX
    packed = packed_key_BHSD, packed_value_BHSE, packed_length_BH
    packed_key_BHSD, packed_value_BHSE, packed_length_BH = (part[words[:, SLOT].long()] for part in packed)
    key, value = (pages[table_BP.long()].transpose(1, 2).flatten(2, 3) for pages in (key_PHND, value_PHNE))
    if ring is not None:
        near = (pages[ring.block_table_BP.long()].transpose(1, 2).flatten(2, 3) for pages in ring[:2])
        is_fast = (words[:, MODE] == FAST)[:, None] & (dense_BH is None or dense_BH == 0)
        is_fast = is_fast[:, :, None, None]
        key, value = (torch.where(is_fast, *both) for both in zip(near, (key, value), strict=True))
    if position_BHS is not None:  # rows in their pages, as the benchmark's packed ones
        row_BHS = position_BHS[words[:, SLOT].long()].clamp_min(0).long()[..., None]
        packed_key_BHSD, packed_value_BHSE = (x.take_along_dim(row_BHS, 2) for x in (key, value))
    place_T, place_S = torch.arange(key.shape[2]), torch.arange(packed_key_BHSD.shape[2])
    last_BW = words[:, LENGTH, None] - torch.arange(W, 0, -1)  # the token of each query
    own_BW = (words[:, LENGTH, None] - last_BW <= words[:, QUERIES, None]) & (words[:, MODE, None] != IDLE)
    start_BH, most_BH = (words[:, word, None].expand_as(packed_length_BH) for word in (START, PACKED))
    sparse_BH = torch.zeros_like(packed_length_BH, dtype=torch.bool)
    if dense_BH is not None:  # the other heads of a mixed request
        sparse_BH = (words[:, MIXED, None] != 0) & (dense_BH == 0)
        start_BH = torch.where(sparse_BH, words[:, MIXED, None] - 1, start_BH)
        most_BH = torch.where(sparse_BH, packed_length_BH, most_BH)
    paged_BHWT = (place_T >= start_BH[:, :, None, None]) & (place_T <= last_BW[:, None, :, None])
    packed = place_S < torch.minimum(packed_length_BH, most_BH)[..., None]
    packed_BHWS = packed[:, :, None].expand(-1, -1, W, -1)
    seen = torch.cat([packed_BHWS, paged_BHWT], 3) & own_BW[:, None, :, None]
    keys, values = torch.cat([packed_key_BHSD, key], 2), torch.cat([packed_value_BHSE, value], 2)
    keys, values = (torch.where(seen.any(2)[..., None], x, 0.0) for x in (keys, values))
    logits = capped(torch.einsum("bhgwd,bhtd->bhgwt", query_BHGWD, keys) * scale, soft_cap)
    logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
    if pseudo is not None:  # of fast requests, whose query is the last
        fast = (words[:, MODE] == FAST)[:, None, None, None, None] & (torch.arange(W) == W - 1)[:, None]
        value, logit = pseudo.part()
        logits = torch.cat([logits, torch.where(fast, logit[..., None], -torch.inf).expand(*logits.shape[:4], 1)], 4)
        values = torch.cat([values, value[:, :, 0].nan_to_num()], 2)
    if sink_HG is not None:  # a term without a value
        logits = torch.cat([logits, sink_HG[:, :, None, None].expand(*logits.shape[:4], 1)], 4)
    share = logits.softmax(-1).nan_to_num()[..., : values.shape[2]]
    out_BHGWE = torch.einsum("bhgwt,bhte->bhgwe", share, values)
    out = out_BHGWE if out is None else stored(out.view(-1), out_BHGWE)
    if not evidence or not step.slow_rows:
        return DecodeAttention(out)
    return DecodeAttention(out, *evidence_of(query_BHGWD, key, step, sparse_BH, into, scale=scale, soft_cap=soft_cap))


def evidence_of(query_BHGWD, key_BHTD, step, sparse_BH, into, *, scale, soft_cap):
    """Compute the last queries' logits of the slow requests and padding, and their sums over J."""
    which, sink, length, start = step.slow_R
    rows = which.clamp_min(0).long()
    logits_R = torch.einsum("bhgwd,bhtd->bhgwt", query_BHGWD[rows, :, :, -1:], key_BHTD[rows]) * scale
    logits_R = capped(logits_R, soft_cap)
    logits_R = logits_R[..., : step.longest]
    place = torch.arange(logits_R.shape[-1])
    allowed = (place >= sink[:, None]) & (place < start[:, None])
    sums = logits_R.masked_fill(~allowed[:, None, None, None], -torch.inf).logsumexp(-1)
    within = (place < length[:, None])[:, None, None, None] & ~sparse_BH[rows][:, :, None, None, None]
    logits_R = torch.where(within, logits_R, torch.nan)  # undefined
    if into is not None:
        logits_R, sums = stored(into, logits_R), stored(into[logits_R.numel() :], sums)
    return logits_R, sums


def stored(room, part):
    """Copy a tensor into the beginning of a flat buffer."""
    return room[: part.numel()].view(part.shape).copy_(part)
