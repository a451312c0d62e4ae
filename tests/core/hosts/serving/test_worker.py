"""The worker engine inside vLLM, without vLLM: plans by hand over a paged cache that the test fills."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from sfi_core import EngineOptions, NullObserver, SfiConfig
from sfi_core.engine.ledger import RequestPass
from sfi_core.engine.run import Run
from sfi_core.hosts.serving.plan import NO_SLOT, Entry, Plan
from sfi_core.hosts.serving.rows import RowLaunch, evidence_numbers
from sfi_core.hosts.serving.worker import BorrowedPages, WorkerEngine
from sfi_core.policies import policy_class
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.step_descriptor import SLOW
from tests.fake_graph import FakeRecorder, use_tensors
from tests.fakes import kernel_device

LAYERS, H, G, N, D, SLOTS, BLOCKS, LONGEST = 2, 2, 2, 16, 16, 2, 24, 128
PADDED, OPTIONS = 4, {"scale": D**-0.5, "soft_cap": None, "sink_HG": None}
CONFIG = SfiConfig().replace(budget=6, recent=8, sink=2, window_prefill=2, dense_layers=())


@dataclass
class Request:
    """A request of the script; its blocks lie anywhere."""

    number: int
    slot: int
    blocks: list[int]
    length: int = 0
    step: int = -1

    def entry(self, request_pass: RequestPass, **options) -> Entry:
        start, self.length = self.length, self.length + request_pass.count
        generates = request_pass.generates
        self.step += generates
        block = self.blocks[(self.length - 1) // N]
        step = self.step if generates else self.step + 1
        selects = self.slot != NO_SLOT and (request_pass.ends_prompt or request_pass.kind == SLOW)
        return Entry(self.number, self.slot, start, block, request_pass, step, selects=selects, **options)


FAST_STEP, SLOW_STEP = (RequestPass.decode(reason) for reason in ("", "trigger"))


def prompt(count: int, *, ends: bool = True) -> RequestPass:
    return RequestPass.prompt(count, ends=ends)


class Server:
    """A worker over a cache in vLLM's layout on a GPU, or in contiguous pages.

    On Triton the decoding rows are those of one launch; with a `recorder` a pass of decoding rows alone, padded to
    `PADDED`, is recorded once, as vLLM does, with no plan known, and replayed.
    """

    def __init__(self, backend: str, *, strided: bool, recorder: FakeRecorder | None = None) -> None:
        self.device, self.recorder = torch.device(kernel_device(backend)), recorder
        both = torch.zeros(LAYERS, BLOCKS, H, N, 2 * D, device=self.device)
        self.cache = [(x[..., :D], x[..., D:]) for x in both]
        if not strided:
            self.cache = [(key.contiguous(), value.contiguous()) for key, value in self.cache]
        store = BorrowedPages(backend, N, SLOTS, LONGEST, self.device)
        for layer, pages in enumerate(self.cache):
            store.borrow(layer, *pages)
        policy = policy_class("sfi")(CONFIG, Trigger(frozenset(), CONFIG), range(LAYERS))
        options = EngineOptions(overlap=False, graphs=False)
        run = Run(policy, NullObserver(), store, device=self.device, engine=options)
        run.layers.update(range(LAYERS))
        for layer in range(LAYERS):
            run.segment(layer)
            run.groups[layer] = G
        numbers = evidence_numbers(H * G, LONGEST)
        evidence = {layer: torch.empty(numbers, device=self.device) for layer in range(LAYERS)}
        launch = RowLaunch(run, evidence if backend == "triton" else {})
        self.engine = WorkerEngine(run, store, launch)
        self.random = torch.Generator().manual_seed(3)
        self.table = torch.zeros(PADDED, LONGEST // N, dtype=torch.int32, device=self.device)
        self.operands = [torch.zeros(LAYERS, PADDED, H, G, D, device=self.device) for _ in range(2)]
        self.graph: Callable[[], None] | None = None

    def step(self, *pairs: tuple[Request, Entry], freed=()) -> torch.Tensor:
        """Go through a pass over rows in the order given; return all layers' outputs."""
        rows, first = [], 0
        self.table.zero_()
        for place, (request, entry) in enumerate(pairs):
            rows.append((first, entry))
            self.table[place, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
            first += entry.count
        new = [
            [torch.randn(first, heads, D, generator=self.random).to(self.device) for heads in (H * G, H, H)]
            for _ in range(LAYERS)
        ]
        for layer, (_, key, value) in enumerate(new):
            self._write(layer, rows, key, value)
        alone = first == len(rows)
        if alone:
            self.engine.launch.rest(PADDED)  # as the builder of vLLM's metadata does
        if alone and self.recorder is not None and self.graph is None:
            self.graph = self.recorder(self._launched)  # before any plan
        self.engine.built["builder"] = lambda engine, _: engine.enter(rows, self.table, PADDED if alone else 0)
        self.engine.begin(Plan([entry for _, entry in pairs][::-1], list(freed)))
        outs = []
        if alone:
            query, out = self.operands
            query[:, :first] = torch.stack([query for query, *_ in new]).view(LAYERS, first, H, G, D)
            out.fill_(torch.nan)
            (self.graph or self._launched)()
            assert not out[:, first:].any()  # padding
            outs = list(out[:, :first].clone())
        for layer, (query, *_) in enumerate(new if not alone else ()):
            out = torch.full((first, H, G, D), torch.nan, device=self.device)
            for place in range(self.engine.launched, len(rows)):
                self._attend(layer, *rows[place], self.table[place], query, out)
            self.engine.attend(layer, query.view(first, H, G, D), out, self.table, **OPTIONS)
            outs.append(out)
        self.engine.leave()
        return torch.stack(outs).cpu()

    def _launched(self) -> None:
        # the layers of a pass as a graph has them
        for layer in range(LAYERS):
            query, out = (operand[layer] for operand in self.operands)
            self.engine.attend(layer, query, out, self.table, **OPTIONS)

    def _write(self, layer: int, rows: list[tuple[int, Entry]], *new: torch.Tensor) -> None:
        # as vLLM's `reshape_and_cache_flash` is documented: slot = block * tokens of a block + token
        slots = [
            self.table[place, j // N] * N + j % N
            for place, (_, entry) in enumerate(rows)
            for j in range(entry.start, entry.length)
        ]
        for pages, values in zip(self.cache[layer], new, strict=True):
            for slot, value in zip(map(int, slots), values, strict=True):
                pages[slot // N, :, slot % N] = value

    def _attend(
        self, layer: int, first: int, entry: Entry, table_P: torch.Tensor, query: torch.Tensor, out: torch.Tensor
    ) -> None:
        # what vLLM's own kernel would
        used = table_P[: -(-entry.length // N)].long()
        key, value = (pages[used].transpose(1, 2).flatten(0, 1)[: entry.length] for pages in self.cache[layer])
        tokens = slice(first, first + entry.count)
        query_XHGD = query[tokens].view(entry.count, H, G, D)
        logits = torch.einsum("xhgd,thd->xhgt", query_XHGD, key) * D**-0.5
        age = torch.arange(entry.start, entry.length)[:, None] - torch.arange(entry.length)
        hidden = (age < 0).to(self.device)[:, None, None]
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        out[tokens] = torch.einsum("xhgt,thd->xhgd", weights, value)


def script(server: Server) -> list[torch.Tensor]:
    """Two requests with slots and one without: pieces, joins, fast steps, a slot's next owner."""
    a, b = Request(0, 0, [3, 9, 4, 11, 7, 1]), Request(1, 1, [2, 13, 5])
    c = Request(2, NO_SLOT, [6, 8])
    outs = [
        server.step((a, a.entry(prompt(48, ends=False), opens=True))),
        server.step((b, b.entry(prompt(33), opens=True)), (a, a.entry(prompt(22)))),
        server.step((a, a.entry(FAST_STEP)), (b, b.entry(FAST_STEP)), (c, c.entry(prompt(20)))),
        server.step((b, b.entry(FAST_STEP)), (c, c.entry(SLOW_STEP)), (a, a.entry(SLOW_STEP))),
        server.step((a, a.entry(FAST_STEP)), (b, b.entry(SLOW_STEP))),
        server.step((a, a.entry(FAST_STEP)), (c, c.entry(SLOW_STEP))),
        server.step((b, b.entry(FAST_STEP)), (a, a.entry(SLOW_STEP))),
    ]
    d = Request(3, 1, [15, 16, 17, 18])
    outs.append(server.step((a, a.entry(FAST_STEP)), (d, d.entry(prompt(39, ends=False), opens=True)), freed=[1]))
    outs.append(server.step((a, a.entry(SLOW_STEP)), (d, d.entry(prompt(1)))))  # as a decoding row for vLLM
    outs.append(server.step((d, d.entry(FAST_STEP)), (a, a.entry(FAST_STEP))))
    return outs


def assert_same(server: Server, plain: Server) -> None:
    """Every pass gives the same outputs, packs the same tokens, and knows the norms of what may be selected."""
    for step, (out, wanted) in enumerate(zip(script(server), script(plain), strict=True)):
        assert not wanted.isnan().any()
        torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5, msg=lambda m, s=step: f"{s}: {m}")
    for layer in range(LAYERS):
        norm_PHN, key_PHND = server.engine.store.pages(layer).norm_PHN, server.cache[layer][0]
        known = norm_PHN[[15, 16]]  # the last owner of slot 1 has selected once
        torch.testing.assert_close(known, key_PHND.norm(dim=-1)[[15, 16]])
        ours, theirs = (host.engine.run.segments[layer] for host in (server, plain))
        assert torch.equal(ours.position_BHS.cpu(), theirs.position_BHS)
        assert torch.equal(ours.length_BH.cpu(), theirs.length_BH)
        assert (theirs.length_BH == CONFIG.sink + CONFIG.budget).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_vllms_layout_equals_contiguous_pages(backend: str) -> None:
    assert_same(Server(backend, strided=True), Server("torch", strided=False))


def test_replayed_decoding_rows_equal_request_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph recorded before any plan serves fast and slow rows, one without a slot, and a prompt's last token."""
    use_tensors(monkeypatch)
    recorder = FakeRecorder()
    assert_same(Server("triton", strided=True, recorder=recorder), Server("torch", strided=False))
    assert (recorder.tapes, recorder.plays) == (1, 6)


def test_a_dummy_pass_changes_nothing() -> None:
    """As many rows as the pass before had, one of which selected anew; nobody has planned it."""
    server = Server("torch", strided=True)
    request = Request(0, 0, [3, 9, 4, 11, 7, 1])
    server.step((request, request.entry(prompt(70), opens=True)))
    server.step((request, request.entry(SLOW_STEP)))
    before = [segment.position_BHS.clone() for segment in server.engine.run.segments.values()]
    server.operands[0].normal_()
    server.engine.launch.rest(PADDED)
    server.engine.attend(0, *(operand[0] for operand in server.operands), server.table, **OPTIONS)
    server.engine.run.end_pass()
    assert not server.operands[1][0].any()
    after = [segment.position_BHS for segment in server.engine.run.segments.values()]
    assert all(map(torch.equal, before, after))


def test_fast_steps_read_a_part() -> None:
    server = Server("torch", strided=True)
    request = Request(0, 0, [3, 9, 4, 11, 7, 1])
    server.step((request, request.entry(prompt(70), opens=True)))
    entry = request.entry(FAST_STEP)
    sparse = server.step((request, entry))
    dense = Server("torch", strided=True)
    other = Request(0, 0, request.blocks)
    dense.step((other, other.entry(prompt(70), opens=True)))
    whole = dense.step((other, other.entry(SLOW_STEP)))
    assert (sparse - whole).abs().max() > 1e-2
