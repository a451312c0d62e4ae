"""Key codes: levels, words and estimated logits, against the formula in float64."""

from itertools import accumulate

import pytest
import torch

from sfi_kernels.key_codes import CodeBasis, bits_of, encode_keys, scan_codes, words
from sfi_kernels.key_codes.layout import BITS
from sfi_kernels.launch import KernelLimitError
from tests.fakes import kernel_device

SCALE = 0.3
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
    """Read a code's levels, [H, T, C]: those of a byte each, or the bits of words, slot by slot."""
    if code.dtype == torch.uint8:
        return code.long().mT
    word = code.long() % 2**32
    fields = [word // 2**first % 2**bits for first, bits in zip(FIRST_BITS, BITS, strict=True)]
    return torch.cat(fields, 1).mT


def encode(backend: str, key: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    """Code on the backend's device and leave the codes there."""
    device = kernel_device(backend, key.dtype)
    return encode_keys.on(backend)(key.to(device), CodeBasis(*(x.to(device) for x in basis)))


def scan(backend: str, query: torch.Tensor, code: torch.Tensor, basis: CodeBasis, scale: float = SCALE) -> torch.Tensor:
    device = code.device
    basis = CodeBasis(*(x.to(device) for x in basis))
    return scan_codes.on(backend)(query.to(device), code, basis, scale=scale).cpu()


def assert_plain(backend: str, H: int, G: int, D: int, T: int, dtype=torch.float32) -> None:
    basis = draw_basis(H, D)
    key, query = draw_keys(basis, T, dtype), torch.randn(H, G, D).to(dtype)
    code, level = encode(backend, key, basis), plain_levels(key, basis)
    assert levels_of(code).tolist() == level
    logits = scan(backend, query, code, basis)
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


def test_a_channel_of_more_bits_is_closer(backend: str):
    """Over one range of keys, the middle of a step is off by half of a step at most."""
    half = torch.tensor([2.0 ** (bits - 1) for bits in BITS])
    basis = CodeBasis(torch.zeros(1, 16), half.diag()[None], (1 / half).diag()[None])
    key = (torch.rand(1, 500, 16) * 2 - 1).contiguous()
    estimate = scan(backend, torch.eye(16)[None], encode(backend, key, basis), basis, 1.0)
    worst = (estimate[0] - key[0].T).abs().amax(1)
    for bits, error in zip(BITS, worst.tolist(), strict=True):
        assert 0.8 < error * 2**bits <= 1 + 1e-5


def test_keys_and_codes_may_be_views(backend: str):
    """Keys of every second page slot and codes at the front of a larger buffer."""
    basis = draw_basis(2, 24)
    key = draw_keys(basis, 70)
    spread = torch.full((70, 2, 3, 24), torch.nan)
    spread[:, :, 1] = key.transpose(0, 1)
    view = spread.to(kernel_device(backend))[:, :, 1].transpose(0, 1)
    code = encode(backend, view, basis)
    assert levels_of(code).tolist() == plain_levels(key, basis)
    room = torch.full((2, code.shape[1], 100), 1, dtype=code.dtype, device=code.device)
    room[..., :70] = code
    query = torch.randn(2, 3, 24)
    torch.testing.assert_close(scan(backend, query, room[..., :70], basis), scan(backend, query, code, basis))


def test_a_basis_may_be_laid_out_channel_by_channel(backend: str):
    basis = draw_basis(2, 24)
    turned = basis._replace(
        encode_HDC=basis.encode_HDC.mT.contiguous().mT, query_HDC=basis.query_HDC.mT.contiguous().mT
    )
    key, query = draw_keys(basis, 9), torch.randn(2, 3, 24)
    code = encode(backend, key, basis)
    assert torch.equal(encode(backend, key, turned), code)
    torch.testing.assert_close(scan(backend, query, code, turned), scan(backend, query, code, basis))


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
    with pytest.raises(ValueError, match=message):
        scan(backend, torch.randn(2, 1, 8), torch.zeros(2, 1, 5, dtype=torch.int32), basis)


def test_what_the_kernels_cannot_take_is_refused():
    pytest.importorskip("triton")
    basis = draw_basis(2, 8)
    with pytest.raises(ValueError, match=r"^words must be int32, got torch.uint8$"):
        scan("triton", torch.randn(2, 1, 8), torch.zeros(2, 1, 5, dtype=torch.uint8), basis)
    with pytest.raises(ValueError, match=r"^words must be \[H=2, W=1, T\], got \[2, 16, 5\]$"):
        scan("triton", torch.randn(2, 1, 8), torch.zeros(2, 16, 5, dtype=torch.uint8), basis)
    wide = draw_basis(1, 300)
    with pytest.raises(KernelLimitError, match=r"^head dimension must be at most 256 .*, got 300;"):
        encode("triton", torch.randn(1, 2, 300), wide)
    with pytest.raises(KernelLimitError, match=r"^head dimension must be at most 256 .*, got 300;"):
        scan("triton", torch.randn(1, 2, 300), torch.zeros(1, 4, 5, dtype=torch.int32), wide)
