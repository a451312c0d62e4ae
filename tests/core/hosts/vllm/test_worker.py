"""The worker engine inside vLLM, without vLLM: plans by hand over a paged cache that the test fills."""

from dataclasses import dataclass

import pytest
import torch

from sfi_core import EngineOptions, NullObserver, SfiConfig
from sfi_core.engine.ledger import RequestPass
from sfi_core.engine.run import Run
from sfi_core.hosts.vllm.planner import NO_SLOT, Entry, Plan
from sfi_core.hosts.vllm.worker import BorrowedPages, WorkerEngine
from sfi_core.policies import policy_class
from sfi_core.triggers.trigger import Trigger
from tests.fakes import kernel_device

LAYERS, H, G, N, D, SLOTS, BLOCKS, LONGEST = 2, 2, 2, 16, 16, 2, 24, 128
CONFIG = SfiConfig().replace(budget=6, recent=8, sink=2, window_prefill=2, dense_layers=())


@dataclass
class Request:
    """A request of the script; its blocks lie anywhere."""

    number: int
    slot: int
    blocks: list[int]
    length: int = 0
    step: int = -1

    def entry(self, one: RequestPass, **options) -> Entry:
        start, self.length = self.length, self.length + one.count
        generates = one.generates
        self.step += generates
        block = self.blocks[(self.length - 1) // N]
        step = self.step if generates else self.step + 1
        return Entry(self.number, self.slot, start, block, one, step, **options)


FAST_STEP, SLOW_STEP = (RequestPass.decode(reason) for reason in ("", "trigger"))


def prompt(count: int, *, ends: bool = True) -> RequestPass:
    return RequestPass.prompt(count, ends=ends)


class Server:
    """A worker over a cache in vLLM's layout on a GPU, or in contiguous pages."""

    def __init__(self, backend: str, *, strided: bool) -> None:
        self.device = torch.device(kernel_device(backend))
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
        self.engine = WorkerEngine(run, store)
        self.random = torch.Generator().manual_seed(3)

    def step(self, *pairs: tuple[Request, Entry], freed=()) -> torch.Tensor:
        """Go through a pass over rows in the order given; return all layers' outputs."""
        rows, first = [], 0
        table_RP = torch.zeros(len(pairs), LONGEST // N, dtype=torch.int32)
        for place, (request, entry) in enumerate(pairs):
            rows.append((first, entry))
            table_RP[place, : len(request.blocks)] = torch.tensor(request.blocks)
            first += entry.count
        self.engine.begin(Plan([entry for _, entry in pairs][::-1], list(freed)))
        outs = []
        for layer in range(LAYERS):
            query, key, value = (
                torch.randn(first, heads, D, generator=self.random).to(self.device) for heads in (H * G, H, H)
            )
            self._write(layer, rows, table_RP, key, value)
            one = self.engine.enter(rows, table_RP.to(self.device))
            out = torch.full((first, H, G, D), torch.nan, device=self.device)
            for place in one.whole:
                self._attend(layer, *rows[place], table_RP[place], query, out)
            self.engine.attend(layer, query.view(first, H, G, D), out, scale=D**-0.5)
            outs.append(out)
        self.engine.leave()
        return torch.stack(outs).cpu()

    def _write(self, layer: int, rows: list[tuple[int, Entry]], table_RP: torch.Tensor, *new: torch.Tensor) -> None:
        # as vLLM's `reshape_and_cache_flash` is documented: slot = block * tokens of a block + token
        slots = [
            table_RP[place, j // N] * N + j % N
            for place, (_, entry) in enumerate(rows)
            for j in range(entry.start, entry.length)
        ]
        for pages, values in zip(self.cache[layer], new, strict=True):
            for slot, value in zip(map(int, slots), values, strict=True):
                pages[slot // N, :, slot % N] = value
        place_X = torch.tensor([*map(int, slots), -1], device=self.device)  # -1 is padding
        self.engine.store.note_norms(layer, new[0], place_X)

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
        server.step((a, a.entry(FAST_STEP))),
        server.step((b, b.entry(FAST_STEP)), (a, a.entry(SLOW_STEP))),
    ]
    d = Request(3, 1, [15, 16, 17, 18])
    outs.append(server.step((a, a.entry(FAST_STEP)), (d, d.entry(prompt(40), opens=True)), freed=[1]))
    outs.append(server.step((d, d.entry(FAST_STEP)), (a, a.entry(FAST_STEP))))
    return outs


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_vllms_layout_equals_contiguous_pages(backend: str) -> None:
    """Every pass gives what the torch backend gives over contiguous pages, and packs the same tokens."""
    plain, server = Server("torch", strided=False), Server(backend, strided=True)
    for step, (out, wanted) in enumerate(zip(script(server), script(plain), strict=True)):
        assert not wanted.isnan().any()
        torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5, msg=lambda m, s=step: f"{s}: {m}")
    for layer in range(LAYERS):
        norm_PHN, key_PHND = server.engine.store.pages(layer).norm_PHN, server.cache[layer][0]
        # padding goes to block 0
        torch.testing.assert_close(norm_PHN[1:], key_PHND.norm(dim=-1)[1:])
        ours, theirs = (one.engine.run.segments[layer] for one in (server, plain))
        assert torch.equal(ours.position_BHS.cpu(), theirs.position_BHS)
        assert torch.equal(ours.length_BH.cpu(), theirs.length_BH)
        assert (theirs.length_BH == CONFIG.sink + CONFIG.budget).all()


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
