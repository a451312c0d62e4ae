"""Eq. 24, with its tie rule, in the reference and in the kernel."""

import pytest
import torch

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.launch import KernelLimitError
from sfi_kernels.top_k import reference, top_k
from tests.covering import covering

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
    kept = sorted(j for j in ranked if scores[j] > MASKED_SCORE / 2)
    return kept + [-1] * (min(budget, len(scores)) - len(kept))


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
    """The mask is -inf in float16."""
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
