"""Eq. 24, with its tie rule, in the reference and in the kernel; and of the scores that `pool_by_page` makes."""

import math

import pytest
import torch

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.launch import KernelLimitError
from sfi_kernels.selector import pool_by_page
from sfi_kernels.top_k import reference, top_k
from tests.covering import covering
from tests.fakes import kernel_device

CHUNK = 4096  # positions of one program


@pytest.fixture(params=["torch", "torch off the CPU", "triton"])
def select(request, kernel_device, monkeypatch):
    """Top-K of a CPU tensor in each backend; whatever the kernel does not write shows."""
    if request.param == "torch":
        return top_k.reference
    if request.param == "torch off the CPU":
        monkeypatch.setattr(reference, "_on_cpu", reference.without_wait)
        return top_k.reference
    pytest.importorskip("triton")
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **k: allocate(*size, **k).fill_(-7))
    return lambda score, budget: top_k.triton(score.to(kernel_device), budget).cpu()


def by_sorting(scores: list[float], budget: int) -> list[int]:
    """Rank by score, then by position; drop what is masked; ascending; pad."""
    ranked = sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:budget]
    positions = sorted(j for j in ranked if scores[j] > MASKED_SCORE / 2)
    return positions + [-1] * (min(budget, len(scores)) - len(positions))


@pytest.mark.parametrize(("length", "budget", "values"), covering([1, 63, 64, 65, 1000], [1, 64, 2048], [1, 3, 1000]))
def test_top_k_equals_sorting_under_heavy_ties(select, length: int, budget: int, values: int):
    """One row has no candidate at all; the index is int32, and the scores stay as they were."""
    score = torch.randint(-values, values, (2, 2, length)).float()
    score[0, 0], score[0, 1, : length // 2] = MASKED_SCORE, MASKED_SCORE
    before = score.tolist()
    index = select(score, budget)
    assert index.tolist() == [[by_sorting(row, budget) for row in rows] for rows in before]
    assert index.dtype == torch.int32
    assert index.is_contiguous()
    assert score.tolist() == before


@pytest.mark.parametrize(("length", "budget"), [(CHUNK - 1, 100), (CHUNK, 8192), (CHUNK + 1, 8192), (9000, 100)])
def test_rows_of_several_chunks(select, length: int, budget: int):
    """Plain scores, few values, one value, and a candidate set in the middle."""
    score = torch.randn(2, 2, length)
    score[0, 1] = torch.randint(3, (length,)).float()
    score[1, 0] = 5.0
    score[1, 1, : length // 3] = score[1, 1, -7:] = MASKED_SCORE
    expected = [[by_sorting(row, budget) for row in rows] for rows in score.tolist()]
    assert select(score, budget).tolist() == expected


def test_ties_are_taken_across_the_border_of_two_chunks(select):
    """Some of the ties before the border, all of them, and one behind it."""
    score = torch.zeros(1, 1, 2 * CHUNK + 5)
    tied = [CHUNK - 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]
    score[..., tied], score[..., [7, 2 * CHUNK + 4]] = 1.0, 2.0
    for room in range(1, 6):
        expected = [7, *tied[:room], 2 * CHUNK + 4]
        assert select(score, room + 2).tolist() == [[expected]]


@pytest.mark.parametrize("low", [0, 255])
def test_better_scores_of_earlier_chunks_make_room_whatever_the_last_byte(select, low: int):
    """The threshold's last byte is the smallest or the largest there is."""
    score = torch.full((1, 1, CHUNK + 20), 0.5)
    score[..., [3, CHUNK + 2]] = 2.0
    tied = [5, CHUNK - 1, CHUNK + 1, CHUNK + 7]
    score[..., tied] = torch.tensor(0x3F800000 + low, dtype=torch.int32).view(torch.float32)
    for room in range(1, 5):
        expected = sorted([3, CHUNK + 2, *tied[:room]])
        assert select(score, room + 2).tolist() == [[expected]]


@pytest.mark.parametrize("byte", [0, 1, 2, 3])
def test_keys_that_differ_in_one_byte_alone_are_told_apart(select, byte: int):
    """Each of the four passes over a key has to count its own byte."""
    step = torch.randperm(256)[:120] if byte < 3 else torch.randperm(120)
    base = 0x3F808080 & ~(255 << 8 * byte)
    score = (base + (step << 8 * byte)).int().view(torch.float32)[None, None] * torch.tensor([[[1], [-1]]])
    for budget in (1, 50, 119):
        expected = [by_sorting(row, budget) for row in score[0].tolist()]
        assert select(score, budget).tolist() == [expected]


def test_extreme_scores_rank_as_numbers_do(select):
    tiny = torch.finfo(torch.float32).tiny
    values = [-4e29, -1e20, -1.0, -tiny, -1e-45, 0.0, 1e-45, tiny, 1.0, 3e38, torch.inf]
    order = torch.randperm(len(values))
    score = torch.tensor(values)[order].view(1, 1, -1)
    for budget in range(1, len(values) + 1):
        best = sorted(j for j, rank in enumerate(order.tolist()) if rank >= len(values) - budget)
        assert select(score, budget).tolist() == [[best]]


def test_minus_zero_ties_with_zero(select):
    score = torch.tensor([[[-1.0, -0.0, 0.0, -0.0, 0.0, -1e-45]]])
    assert select(score, 3).tolist() == [[[1, 2, 3]]]


def test_one_candidate_far_behind_is_found(select):
    """The padding is longer than a chunk."""
    score = torch.full((1, 1, 2 * CHUNK + 9), MASKED_SCORE)
    score[..., 2 * CHUNK + 3] = -1e6
    assert select(score, CHUNK + 100).tolist() == [[[2 * CHUNK + 3] + [-1] * (CHUNK + 99)]]


def test_a_score_lowered_below_the_mask_is_still_masked(select):
    """Soft-NMS pushes masked scores further down (Eq. 21)."""
    masked = [1.5 * MASKED_SCORE, 0.6 * MASKED_SCORE, MASKED_SCORE / 2, -torch.inf]
    score = torch.tensor([[[*masked, 0.4 * MASKED_SCORE]]])
    assert select(score, 5).tolist() == [[[4, -1, -1, -1, -1]]]


def test_double_precision_ranks_the_same_in_the_reference():
    score = torch.randint(9, (2, 3, 50)).float()
    score[1, :, 5:] = MASKED_SCORE
    assert torch.equal(top_k.reference(score.double(), 8), top_k.reference(score, 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_ranks_the_same(select, dtype: torch.dtype, kernel_device: str):
    if dtype == torch.bfloat16 and kernel_device == "cpu":
        pytest.skip("Triton's interpreter has no bfloat16")
    score = torch.randn(2, 2, 1000).to(dtype)
    score[1, :, 5:] = MASKED_SCORE
    assert torch.equal(select(score, 64), top_k.reference(score.float(), 64))


def test_double_precision_is_refused_by_the_kernel():
    pytest.importorskip("triton")
    message = "^score must be float32, float16 or bfloat16 for the kernel, got torch.float64; use"
    with pytest.raises(KernelLimitError, match=message):
        top_k.triton(torch.zeros(1, 1, 4, dtype=torch.float64), 2)


@pytest.mark.parametrize("part", [slice(3, 70), slice(0, 130, 2)])
def test_scores_inside_a_larger_buffer_are_read_in_place(select, part: slice):
    buffer = torch.randn(3, 4, 130)
    score = buffer[1:, 1:3, part]
    assert torch.equal(select(score, 9), top_k.reference(score.contiguous(), 9))


@pytest.mark.parametrize("budget", [0, -3])
def test_a_budget_that_is_not_positive_is_refused(select, budget: int):
    with pytest.raises(ValueError, match=f"^budget must be positive, got {budget}$"):
        select(torch.zeros(1, 1, 4), budget)
    with pytest.raises(ValueError, match=r"^score must be \[B, H, T\], got \[4\]$"):
        select(torch.zeros(4), 2)


FIRST, STOP, T = 5, 83, 90  # J and the length: neither begins nor ends with a page


def scores(*, ties: bool) -> torch.Tensor:
    """Return scores of two requests and three heads, a rounding of a normal where many are to be equal."""
    score_BHT = torch.randn(2, 3, T, generator=torch.Generator().manual_seed(0)) * 2
    score_BHT = score_BHT.round() if ties else score_BHT
    score_BHT[..., :FIRST] = 1.5 * MASKED_SCORE  # Soft-NMS leaves less than the mask
    score_BHT[0, :, STOP:] = MASKED_SCORE
    score_BHT[1, :, STOP - 40 :] = MASKED_SCORE
    return score_BHT


def by_hand(score_T: list[float], page_size: int, budget: int) -> list[int]:
    """Take pages, best mean first, as sets; the last one from the front as far as the budget goes."""
    pages: dict[int, set[int]] = {}
    for position, score in enumerate(score_T):
        if score > MASKED_SCORE / 2:
            pages.setdefault(position // page_size, set()).add(position)
    mean = {
        page: math.fsum(math.exp(score_T[position]) for position in sorted(positions)) / len(positions)
        for page, positions in pages.items()
    }
    chosen: set[int] = set()
    for page in sorted(pages, key=lambda page: (-mean[page], page)):
        room = budget - len(chosen)
        chosen |= set(sorted(pages[page])[:room])
    return sorted(chosen)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("page_size", "budget"), [(1, 20), (4, 1), (7, 20), (7, T), (16, 48), (128, 20)])
def test_top_k_takes_whole_pages(backend: str, page_size: int, budget: int):
    if backend == "triton":
        pytest.importorskip("triton")
    device = kernel_device(backend)
    for score_BHT in (scores(ties=False), scores(ties=True)):
        pooled_BHT = pool_by_page(score_BHT.to(device), page_size)
        index_BHK = top_k.on(backend)(pooled_BHT, budget).cpu()
        for score_HT, index_HK in zip(score_BHT.tolist(), index_BHK.tolist(), strict=True):
            for score_T, index_K in zip(score_HT, index_HK, strict=True):
                expected = by_hand(score_T, page_size, budget)
                assert index_K == expected + [-1] * (len(index_K) - len(expected))


def test_pages_of_one_token_change_nothing_within_j():
    score_BHT = scores(ties=False)
    inside_BHT = score_BHT > MASKED_SCORE / 2
    pooled_BHT = pool_by_page(score_BHT, 1)
    assert torch.equal(pooled_BHT[inside_BHT], score_BHT[inside_BHT])
    assert (pooled_BHT[~inside_BHT] == MASKED_SCORE).all()


def test_a_page_has_a_token():
    with pytest.raises(ValueError, match=r"^page_size must be positive, got 0$"):
        pool_by_page(scores(ties=False), 0)
