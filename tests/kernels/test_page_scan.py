"""Choosing pages for a batch: the kernels against the reference, the reference against positions one by one."""

import pytest
import torch

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.page_scan import LastStep, PageSummaries, page_scan, summarize
from sfi_kernels.page_scan import triton as kernels
from sfi_kernels.page_scan.reference import best_pages
from sfi_kernels.step_descriptor import FAST, IDLE, SLOT, SLOW, StepRequest, describe_step
from sfi_kernels.top_k import top_k
from tests.covering import first

H, G, D, N, SINK, RECENT = 2, 3, 8, 8, 2, 5
LENGTHS = (61, 33, 9, 6, 40, 50)  # J cuts pages at both ends, has fewer positions than the budget, or none
MODES = (FAST, FAST, FAST, FAST, IDLE, SLOW)
CAPACITY = 72


class Batch:
    """Rows of some lengths whose pages lie in any order; whole numbers, so that scores tie and no sum is rounded."""

    def __init__(self, page: int, dtype: torch.dtype = torch.float32, *, modes=MODES, queries: int = 1) -> None:
        generator = torch.Generator().manual_seed(page)
        B, P = len(LENGTHS), CAPACITY // N
        self.key = torch.randint(-2, 3, (B * P, H, N, D), generator=generator).to(dtype)
        self.query = torch.randint(-2, 3, (B, H, G, D), generator=generator).to(dtype)
        self.table = torch.randperm(B * P, generator=generator).view(B, P).int()
        requests = [
            StepRequest(
                mode=mode, length=length, recent_start=max(SINK, length - RECENT), packed=0, sink=SINK,
                count=queries if mode == SLOW else 1,
            )
            for length, mode in zip(LENGTHS, modes, strict=True)
        ]  # fmt: skip
        self.step = describe_step(requests, 0, torch.device("cpu"))
        # as after the step before, but for a page that holds what nobody took back
        keys = self.key[self.table.long()].transpose(1, 2).flatten(2, 3)
        self.page, self.pages = page, PageSummaries(*torch.zeros(2, B, H, -(-CAPACITY // page), D, dtype=dtype))
        for row, length in enumerate(LENGTHS):
            known = length - requests[row].count
            for part, end in zip(self.pages, summarize(keys[row, :, :known], page), strict=True):
                part[row, :, : end.shape[1]] = end
                part[row, :, known // page :] = 99
        self.last = LastStep(
            torch.randint(-2, 3, (B, 2, H, G, D), generator=generator).to(dtype),
            torch.full((B, 2, H, 12), -1, dtype=torch.int32),
        )
        self.last.index_B2HK[:] = torch.arange(2, 14, dtype=torch.int32)

    def run(self, backend: str, budget: int, **ahead):
        """Return all that the op returns and writes."""
        pages, last = PageSummaries(*(x.clone() for x in self.pages)), LastStep(*(x.clone() for x in self.last))
        position = torch.full((len(pages[0]), H, SINK + budget + 3), 77, dtype=torch.int32)
        length = torch.full((len(pages[0]), H), 77, dtype=torch.int32)
        choice = page_scan.on(backend)(
            self.query, self.key, self.table, self.step, pages, position, length, last if ahead else None,
            page=self.page, budget=budget, **ahead,
        )  # fmt: skip
        return choice, pages, last, position, length


def same(results, wanted) -> None:
    """Equal to the bit, in fast rows; what others have is theirs."""
    fast = torch.tensor([mode == FAST for mode in MODES])
    (ours, *rest), (theirs, *others) = results, wanted
    assert torch.equal(ours.index_BHK[fast], theirs.index_BHK[fast])
    for part, other in zip(rest, others, strict=True):
        for x, y in zip(part, other, strict=True) if isinstance(part, tuple) else [(part, other)]:
            assert torch.equal(x, y)


@pytest.mark.parametrize(("page", "dtype"), [(4, torch.float32), *first([(3, torch.float16), (16, torch.float32)])])
def test_the_kernels_choose_the_reference_s_pages(monkeypatch, page: int, dtype: torch.dtype):
    """Over several chunks and tiles; rows that are not fast are left as they are, but for their extremes."""
    monkeypatch.setattr(kernels, "TILE", 8)
    monkeypatch.setattr(kernels, "CHUNK", 16)
    for queries in (1, 7):
        batch = Batch(page, dtype, queries=queries)
        for budget in (1, 12):
            results, wanted = (batch.run(backend, budget) for backend in ("triton", "torch"))
            same(results, wanted)
            assert bool((results[3][4:] == 77).all())
        # the extremes of the pages with new keys were undefined
        keys = batch.key[batch.table[5].long()].transpose(0, 1).flatten(1, 2)
        for part, end in zip(results[1], summarize(keys[:, :50], page), strict=True):
            assert torch.equal(part[5, :, : end.shape[1]], end)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_find_what_is_kept_by_slot(backend: str):
    """As under vLLM: fewer slots than rows, and a slow row without one, whose pages nobody keeps."""
    batch, fast, rows = Batch(4), slice(4), [1, 3, 0, 2]
    wanted, *before = batch.run(backend, 12, tau=0.1, diagnoses=True)
    batch.pages, batch.last = PageSummaries(*(x[rows] for x in batch.pages)), LastStep(*(x[rows] for x in batch.last))
    batch.step.table_BX[:, SLOT] = torch.tensor([2, 0, 3, 1, -1, -1], dtype=torch.int32)
    choice, *after = batch.run(backend, 12, tau=0.1, diagnoses=True)
    assert torch.equal(choice.index_BHK[fast], wanted.index_BHK[fast])
    for ours, theirs in zip((*after[0], *after[1], *after[2:]), (*before[0], *before[1], *before[2:]), strict=True):
        assert torch.equal(ours, theirs[rows])


@pytest.mark.parametrize("tau", [0.1, *first([-1.0, 1.1])])
def test_a_choice_for_the_next_step_is_the_reference_s(monkeypatch, tau: float):
    monkeypatch.setattr(kernels, "TILE", 8)
    monkeypatch.setattr(kernels, "CHUNK", 16)
    batch = Batch(4)
    options = {"recent": RECENT, "scale": 0.5, "tau": tau}
    results, wanted = (batch.run(backend, 12, **options, diagnoses=True) for backend in ("triton", "torch"))
    same(results, wanted)
    (ours, *_), (theirs, *_), fast = results, wanted, slice(4)
    assert torch.equal(ours.corrected_BH[fast], theirs.corrected_BH[fast])
    assert torch.equal(ours.ahead_BHK[fast], theirs.ahead_BHK[fast])
    cosines = [choice.diagnostics["query_cosine"][fast] for choice in (ours, theirs)]
    torch.testing.assert_close(*cosines)
    corrected = int(ours.corrected_BH[fast].sum())
    assert (0 < corrected < 8) if tau == 0.1 else corrected == 8 * (tau > 0)
    quiet, *rest = batch.run("triton", 12, **options)
    assert torch.equal(rest[2], results[3]), "positions do not depend on who listens"
    assert quiet.diagnostics == {}
    # a second time, as for a step that was launched ahead
    batch.last = results[2]
    twice = batch.run("triton", 12, **options)
    assert torch.equal(twice[3], results[3])


@pytest.mark.parametrize("tied", [False, True])
def test_the_best_pages_are_the_best_positions(*, tied: bool):
    """Pages that J cuts at either end, budgets that cut a page, and empty candidate sets."""
    generator = torch.Generator().manual_seed(5)

    def below(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    for _ in range(300):
        page, T, budget = 1 + below(8), 1 + below(60), 1 + below(40)
        first, stop = sorted((below(T + 1), below(T + 1)))
        score_HP = torch.rand(3, -(-T // page), generator=generator)
        if tied:
            score_HP = (4 * score_HP).floor()
        position_T = torch.arange(T)
        outside = (position_T < first) | (position_T >= stop)
        score_HT = score_HP.repeat_interleave(page, 1)[:, :T].masked_fill(outside, MASKED_SCORE)
        expected = top_k(score_HT[None], budget)[0, :, : stop - first]
        assert torch.equal(best_pages(score_HP, page, (first, stop), budget), expected)
