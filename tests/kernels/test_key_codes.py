"""Key codes: levels, words and estimated logits, against the formula in float64; and the choice by them."""

import math
from itertools import accumulate

import pytest
import torch

from sfi_kernels.code_scan import BatchCodes, CodeBasis, bits_of, encode_keys, words
from sfi_kernels.code_scan.codes import BITS
from sfi_kernels.code_scan.reference import choose_likeliest, scanned
from sfi_kernels.launch import KernelLimitError
from tests.fakes import coarse, kernel_device

SCALE, REST = 0.3, 0.3
EDGE = 1e-3  # steps that a key keeps from a level's edge, much more than rounding moves it
FIRST_BITS = list(accumulate(BITS, initial=0))[:-1]


@pytest.fixture(params=["torch", "triton", "numba"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param != "torch":
        pytest.importorskip(request.param)
    return request.param


def draw_basis(H: int, D: int) -> CodeBasis:
    C = 16 * words(D)
    return CodeBasis(torch.randn(H, D), torch.randn(H, D, C) * 0.3, torch.randn(H, D, C))


def channels(key_HTD: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    centred = key_HTD.double() - basis.mean_HD.double()[:, None]
    return torch.einsum("htd,hdc->htc", centred, basis.encode_HDC.double())


def draw_keys(basis: CodeBasis, T: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw keys of which no channel lies close to an edge between two levels."""
    H, D = basis.mean_HD.shape
    key = torch.randn(H, T, D).to(dtype)
    while True:
        step = channels(key, basis)
        close = ((step - step.round()).abs() < EDGE).any(-1)
        if not close.any():
            return key
        key[close] = torch.randn(int(close.sum()), D).to(dtype)


def plain_levels(key_HTD: torch.Tensor, basis: CodeBasis) -> list[list[list[int]]]:
    """A level is the whole steps below the channel, from 0 at -2^(bits - 1), cut off at both ends."""
    return [
        [
            [
                min(max(int(step // 1) + 2**bits // 2, 0), 2**bits - 1)
                for step, bits in zip(row, bits_of(key_HTD.shape[2]), strict=True)
            ]
            for row in head
        ]
        for head in channels(key_HTD, basis).tolist()
    ]


def plain_logits(query: torch.Tensor, level: list[list[list[int]]], basis: CodeBasis) -> torch.Tensor:
    """A level stands for the middle of its step; the mean was taken from the key."""
    middle = torch.tensor(level).double() + 0.5 - torch.tensor([2**bits / 2 for bits in bits_of(query.shape[2])])
    query_C = torch.einsum("hgd,hdc->hgc", query.double(), basis.query_HDC.double())
    mean = torch.einsum("hgd,hd->hg", query.double(), basis.mean_HD.double())
    return SCALE * (torch.einsum("hgc,htc->hgt", query_C, middle) + mean[..., None])


def levels_of(code: torch.Tensor) -> torch.Tensor:
    """Read a code's levels, [H, T, C]: the bits of words, slot by slot."""
    word = code.long() % 2**32
    fields = [word // 2**first % 2**bits for first, bits in zip(FIRST_BITS, BITS, strict=True)]
    return torch.cat(fields, 1).mT


def encode(backend: str, key: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    device = kernel_device(backend, key.dtype)
    return encode_keys.on(backend)(key.to(device), CodeBasis(*(x.to(device) for x in basis)))


def scan(query_HGD: torch.Tensor, word_HWT: torch.Tensor, basis: CodeBasis, scale: float = SCALE) -> torch.Tensor:
    (H, T), (G, D) = word_HWT.shape[::2], query_HGD.shape[1:]
    codes = BatchCodes.empty(1, G, torch.empty(1, H, T, D), torch.empty(1, H, T, D), T)
    codes.learn(0, basis)
    codes.word_BHWT[0] = word_HWT
    return scanned(query_HGD, codes, 0, scale)


def assert_plain(backend: str, H: int, G: int, D: int, T: int, dtype=torch.float32) -> None:
    basis = draw_basis(H, D)
    key, query = draw_keys(basis, T, dtype), torch.randn(H, G, D).to(dtype)
    code, level = encode(backend, key, basis), plain_levels(key, basis)
    assert levels_of(code).tolist() == level
    if backend != "torch":
        return
    logits = scan(query, code, basis)
    assert (logits.shape, logits.dtype) == ((H, G, T), torch.float32)
    expected = plain_logits(query, level, basis)
    # float32 sums of D terms, then of C levels of at most 8 steps
    atol = 1e-6 * float(query.double().norm(dim=-1).max()) * 16 * words(D) * 8
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("H", "G", "D", "T"), [(1, 1, 64, 1), (3, 7, 128, 65), (1, 3, 256, 130), (1, 40, 16, 7)])
def test_levels_and_logits_are_those_of_the_formula(backend: str, H: int, G: int, D: int, T: int):
    """Neither the keys nor the heads of a group fill a program's block."""
    assert_plain(backend, H, G, D, T)


@pytest.mark.parametrize(("D", "W"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 4), (256, 4), (300, 4)])
def test_a_key_has_words_by_its_width(D: int, W: int):
    """And the first channels the most bits, which come from all words."""
    assert words(D) == W
    assert bits_of(D) == (4,) * 4 * W + (2,) * 4 * W + (1,) * 8 * W


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_coded_in_float32(backend: str, dtype: torch.dtype):
    assert_plain(backend, 2, 3, 80, 63, dtype)


def test_a_level_begins_at_its_edge_and_ends_before_the_next(backend: str):
    """The first and the last level take all that lies beyond them."""
    steps = [-1e6, -8.5, -8, -7.5, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 6.5, 7, 7.5, 8, 1e6]
    key = torch.tensor(steps)[None, :, None].expand(1, -1, 16).contiguous()
    basis = CodeBasis(torch.zeros(1, 16), torch.eye(16)[None], torch.eye(16)[None])
    level = levels_of(encode(backend, key, basis))[0].T.tolist()
    of_4_bits = [0, 0, 0, 0, 6, 6, 7, 7, 8, 8, 9, 9, 14, 15, 15, 15, 15]
    of_2_bits = [0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3]
    of_1_bit = [0] * 8 + [1] * 9
    assert level == [of_4_bits] * 4 + [of_2_bits] * 4 + [of_1_bit] * 8


def test_a_channel_of_more_bits_is_closer():
    """Over one range of keys, the middle of a step is off by half of a step at most."""
    half = torch.tensor([2.0 ** (bits - 1) for bits in BITS])
    basis = CodeBasis(torch.zeros(1, 16), half.diag()[None], (1 / half).diag()[None])
    key = (torch.rand(1, 500, 16) * 2 - 1).contiguous()
    estimate = scan(torch.eye(16)[None], encode_keys.reference(key, basis), basis, 1.0)
    worst = (estimate[0] - key[0].T).abs().amax(1)
    for bits, error in zip(BITS, worst.tolist(), strict=True):
        assert 0.8 < error * 2**bits <= 1 + 1e-5


def test_keys_may_be_views(backend: str):
    """Keys of every second page slot."""
    basis = draw_basis(2, 24)
    key = draw_keys(basis, 70)
    spread = torch.full((70, 2, 3, 24), torch.nan)
    spread[:, :, 1] = key.transpose(0, 1)
    view = spread.to(kernel_device(backend))[:, :, 1].transpose(0, 1)
    assert levels_of(encode(backend, view, basis)).tolist() == plain_levels(key, basis)


def test_a_basis_may_be_laid_out_channel_by_channel(backend: str):
    basis = draw_basis(2, 24)
    turned = basis._replace(encode_HDC=basis.encode_HDC.mT.contiguous().mT)
    key = draw_keys(basis, 9)
    assert torch.equal(encode(backend, key, turned), encode(backend, key, basis))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mean_HD", lambda x: x[:1], r"^mean must be \[H=2, D=8\], got \[1, 8\]$"),
        ("encode_HDC", lambda x: x[..., :15], r"^encode must be \[H=2, D=8, C=16\], got \[2, 8, 15\]$"),
        ("query_HDC", lambda x: x[:, :7], r"^query must be \[H=2, D=8, C=16\], got \[2, 7, 16\]$"),
    ],
)
def test_a_basis_that_does_not_fit_is_named(backend: str, name, change, message: str):
    basis = draw_basis(2, 8)
    basis = basis._replace(**{name: change(getattr(basis, name))})
    with pytest.raises(ValueError, match=message):
        encode(backend, torch.randn(2, 5, 8), basis)


def test_a_head_that_the_kernel_cannot_take_is_refused():
    pytest.importorskip("triton")
    with pytest.raises(KernelLimitError, match=r"^head dimension must be at most 256 .*, got 300;"):
        encode("triton", torch.randn(1, 2, 300), draw_basis(1, 300))


def assert_chosen(logits_HGT: torch.Tensor, budget: int) -> None:
    """Compare with a sort of the 8 bits of a score, in which the lower position wins a tie."""
    weight_HGT = logits_HGT.double().softmax(-1)
    index_HK, unread_HG = choose_likeliest(logits_HGT, budget, rest=REST)
    assert index_HK.dtype == torch.int32
    score_HT = coarse(weight_HGT.mean(1))
    for head, score_T in enumerate(score_HT):
        best = sorted(score_T.sort(descending=True, stable=True).indices[:budget].tolist())
        assert index_HK[head].tolist() == best
        others = [t for t in range(len(score_T)) if t not in best]
        expected_G = logits_HGT[head, :, others].double().logsumexp(-1) + math.log(REST)
        # the sum of the others is 1 minus that of the chosen, in float32
        atol_G = 1e-6 * REST * logits_HGT[head].double().exp().sum(-1)
        off_G = (unread_HG[head].double().exp() - expected_G.exp()).abs()
        assert (off_G <= atol_G).all()


@pytest.mark.parametrize(("H", "G", "T", "K"), [(2, 1, 2, 1), (3, 2, 70, 69), (1, 3, 700, 37), (2, 8, 999, 400)])
def test_the_likeliest_are_chosen_and_the_others_weighed(H: int, G: int, T: int, K: int):
    assert_chosen(torch.randn(H, G, T) * 2, K)


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_a_tie_goes_to_the_lower_position(levels: int):
    level_T = torch.randint(levels, (300,)).float()
    assert_chosen(level_T.expand(2, 3, -1).contiguous(), 100)


def test_one_key_may_have_all_the_weight():
    """The other weights are too small for float32, so that the lowest positions fill the budget."""
    logits = torch.full((1, 2, 50), -300.0)
    logits[:, :, 30] = 0.0
    index_HK, unread_HG = choose_likeliest(logits, 4, rest=REST)
    assert index_HK.tolist() == [[0, 1, 2, 30]]
    assert (unread_HG == -torch.inf).all()


def test_nothing_of_the_rest_counts_with_a_factor_of_zero():
    assert (choose_likeliest(torch.randn(1, 2, 50), 4, rest=0.0)[1] == -torch.inf).all()


def test_a_budget_leaves_something_to_choose():
    with pytest.raises(ValueError, match=r"^budget must be within 1 and 9, got 10$"):
        choose_likeliest(torch.randn(1, 2, 10), 10, rest=REST)
