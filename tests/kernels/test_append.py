"""The paged cache: appending keys, values and norms, in the reference and in the kernel, and reading them."""

import pytest
import torch

from sfi_kernels import pages as paging
from sfi_kernels.fused import Appending, rotary
from sfi_kernels.pack import append
from sfi_kernels.pages import HeadPages, Ring, read_pages, wide_chunks
from tests.fakes import paged

H, D, E = 2, 8, 6


@pytest.fixture(params=["torch", "triton"])
def run(request, kernel_device):
    """Append in each backend."""
    if request.param == "torch":
        return append.reference
    pytest.importorskip("triton")

    def on_device(*tensors: torch.Tensor, ring: Ring | None = None) -> None:
        near, homes = (ring[:3], ring.heads) if ring else ((), ())
        moved = [tensor.to(kernel_device) for tensor in (*tensors, *near, *homes)]
        moved_ring = Ring(*moved[8:11], HeadPages(*moved[11:])) if ring else None
        append.triton(*moved[:8], ring=moved_ring)
        for tensor, result in zip((*tensors, *near, *homes)[4:], moved[4:], strict=True):
            tensor.copy_(result)

    return on_device


class Cache:
    def __init__(self, B: int, capacity: int, page_size: int, D=D, E=E, dtype=torch.float32):
        per_request = -(-capacity // page_size)
        P = B * per_request
        self.key_PHND = torch.full((P, H, page_size, D), torch.nan, dtype=dtype)
        self.value_PHNE = torch.full((P, H, page_size, E), torch.nan, dtype=dtype)
        self.norm_PHN = torch.full((P, H, page_size), torch.nan)
        self.table_BP = torch.randperm(P).int().view(B, per_request)

    def append(self, run, key, value, start: list[int], count: list[int], **options: Ring) -> None:
        words = [torch.tensor(values, dtype=torch.int32) for values in (start, count)]
        run(key, value, *words, self.key_PHND, self.value_PHNE, self.norm_PHN, self.table_BP, **options)

    def read(self, pages: torch.Tensor, request: int) -> torch.Tensor:
        """Return a request's pages in order, [H, capacity, ...]."""
        return pages[self.table_BP[request].long()].transpose(0, 1).flatten(1, 2)


def new_tokens(B: int, T: int, count: list[int], D=D, E=E, dtype=torch.float32):
    """Make keys and values as transformers hands them over, transposed; NaN where padding is."""
    key, value = torch.randn(B, T, H, D).to(dtype), torch.randn(B, T, H, E).to(dtype)
    for row, tokens in enumerate(count):
        key[row, : T - tokens], value[row, : T - tokens] = torch.nan, torch.nan
    return key.transpose(1, 2), value.transpose(1, 2)


def norm_bound(key: torch.Tensor) -> float:
    """Bound a norm's relative error: D products, D - 1 sums and a root, a float32 rounding each."""
    return (key.shape[-1] / 2 + 2) * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("page_size", "dtype"), [(1, torch.float32), (16, torch.float16), (64, torch.float32), (300, torch.float16)]
)
def test_ragged_pieces_land_behind_what_is_cached(run, page_size: int, dtype: torch.dtype):
    """Whatever the pages' borders; nothing is written before a request's start or behind its end."""
    start, count, capacity = [5, 0, 63, 17], [70, 3, 2, 0], 100
    cache = Cache(4, capacity, page_size, dtype=dtype)
    key, value = new_tokens(4, 70, count, dtype=dtype)
    cache.append(run, key, value, start, count)
    for row, (first, tokens) in enumerate(zip(start, count, strict=True)):
        part = slice(first, first + tokens)
        norm = torch.linalg.vector_norm(key[row, :, 70 - tokens :].double(), dim=-1)
        for pages, expected in ((cache.key_PHND, key), (cache.value_PHNE, value)):
            cached = cache.read(pages, row)
            assert torch.equal(cached[:, part], expected[row, :, 70 - tokens :])
            assert cached[:, : part.start].isnan().all()
            assert cached[:, part.stop :].isnan().all()
        cached = cache.read(cache.norm_PHN, row)
        torch.testing.assert_close(cached[:, part].double(), norm, rtol=norm_bound(key), atol=0)
        assert cached[:, : part.start].isnan().all()
        assert cached[:, part.stop :].isnan().all()


@pytest.mark.parametrize("page_size", [1, 64])
def test_one_token_a_request_is_a_decoding_step(run, page_size: int):
    start, count = [63, 64, 5], [1, 1, 0]
    cache = Cache(3, 80, page_size)
    key, value = new_tokens(3, 1, count)
    cache.append(run, key, value, start, count)
    for row in (0, 1):
        assert torch.equal(cache.read(cache.key_PHND, row)[:, start[row]], key[row, :, 0])
        assert torch.equal(cache.read(cache.value_PHNE, row)[:, start[row]], value[row, :, 0])
    assert int((~cache.key_PHND.isnan()).sum()) == 2 * H * D
    assert int((~cache.value_PHNE.isnan()).sum()) == 2 * H * E
    assert int((~cache.norm_PHN.isnan()).sum()) == 2 * H


@pytest.mark.parametrize("T", [31, 32, 33])
def test_pieces_around_the_size_of_a_tile(run, T: int):
    cache = Cache(1, 70, 16)
    key, value = new_tokens(1, T, [T])
    cache.append(run, key, value, [2], [T])
    assert torch.equal(cache.read(cache.key_PHND, 0)[:, 2 : T + 2], key[0])
    assert cache.read(cache.norm_PHN, 0)[:, T + 2 :].isnan().all()


@pytest.mark.parametrize(
    ("D", "E", "dtype", "T"),
    [(80, 96, torch.half, 5), (1, 7, torch.float, 5), (192, 128, torch.float, 1), (256, 256, torch.half, 5)],
)
def test_rows_of_any_width_are_copied_bit_by_bit(run, D: int, E: int, dtype, T: int):
    cache = Cache(1, 8, 4, D, E, dtype)
    key, value = new_tokens(1, T, [T], D, E, dtype)
    cache.append(run, key, value, [1], [T])
    part = slice(1, T + 1)
    assert torch.equal(cache.read(cache.key_PHND, 0)[:, part], key[0])
    assert torch.equal(cache.read(cache.value_PHNE, 0)[:, part], value[0])
    norm = torch.linalg.vector_norm(key[0].double(), dim=-1)
    cached = cache.read(cache.norm_PHN, 0)[:, part].double()
    torch.testing.assert_close(cached, norm, rtol=norm_bound(key), atol=0)


def test_norms_of_half_precision_are_computed_in_float32(run):
    """A float16 norm of these keys would overflow."""
    cache = Cache(1, 4, 4, dtype=torch.float16)
    key = torch.full((1, H, 1, D), 40000.0, dtype=torch.float16)
    cache.append(run, key, key[..., :E], [0], [1])
    assert torch.equal(cache.norm_PHN[:, :, 0], torch.full((1, H), 40000.0 * D**0.5))


def test_views_of_a_fused_projection_are_read_in_place(run):
    """Keys and values side by side in one buffer; only the last stride is 1."""
    fused = torch.randn(2, 5, H * (D + E) + 3)
    key = fused[..., : H * D].view(2, 5, H, D).transpose(1, 2)
    value = fused[..., H * D : H * (D + E)].view(2, 5, H, E).transpose(1, 2)
    cache = Cache(2, 9, 4)
    cache.append(run, key, value, [0, 4], [5, 2])
    for row, part, piece in ((0, slice(0, 5), slice(0, 5)), (1, slice(4, 6), slice(3, 5))):
        assert torch.equal(cache.read(cache.key_PHND, row)[:, part], key[row, :, piece])
        assert torch.equal(cache.read(cache.value_PHNE, row)[:, part], value[row, :, piece])


def test_tensors_that_do_not_fit_are_named(run):
    cache = Cache(2, 9, 4)
    key, value = new_tokens(2, 3, [3, 3])
    with pytest.raises(ValueError, match=r"^count must be \[B=2\], got \[1\]$"):
        cache.append(run, key, value, [0, 0], [3])
    with pytest.raises(ValueError, match=r"^value must be \[B=2, H=2, T=3, E\], got \[2, 2, 2, 6\]$"):
        cache.append(run, key, value[:, :, 1:], [0, 0], [3, 3])
    with pytest.raises(ValueError, match=r"^key_pages must have the dtype of key, torch.float16"):
        cache.append(run, key.half(), value, [0, 0], [3, 3])
    with pytest.raises(ValueError, match=r"^key must have a last stride of 1, got 3$"):
        cache.append(run, torch.randn(2, H, D, 3).transpose(2, 3), value, [0, 0], [3, 3])
    cache.norm_PHN = cache.norm_PHN.double()
    with pytest.raises(ValueError, match=r"^norm must be contiguous float32, got torch.float64"):
        cache.append(run, key, value, [0, 0], [3, 3])


HEADS, T, WIDTH = 2, 40, 3


@pytest.mark.parametrize("page_size", [1, 7, 16, 40, 64])
@pytest.mark.parametrize(("start", "stop"), [(0, 40), (0, 1), (39, 40), (3, 5), (6, 8), (7, 14), (15, 33), (16, 32)])
def test_the_rows_are_those_of_the_request_wherever_pages_end(page_size: int, start: int, stop: int):
    rows = [torch.randn(HEADS, T, WIDTH), torch.randn(HEADS, 23, WIDTH)]
    pages, table_BP = paged(rows, page_size, spare_pages=1)
    read = read_pages(pages, table_BP[0], start, stop)
    assert torch.equal(read, rows[0][None, :, start:stop])


def test_pages_of_numbers_read_like_pages_of_vectors():
    """The key norms have no WIDTH."""
    norms = torch.rand(HEADS, T)
    pages, table_BP = paged([norms], 16)
    assert torch.equal(read_pages(pages, table_BP[0], 5, 37), norms[None, :, 5:37])


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (3, 19), (20, 40), (21, 40)])
def test_rows_within_one_page_are_not_copied(start: int, stop: int):
    """On a CPU a request has one page, which may be full."""
    pages, table_BP = paged([torch.randn(HEADS, T, WIDTH)], 20)
    read = read_pages(pages, table_BP[0], start, stop)
    assert read.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()


@pytest.mark.parametrize("position", [0, 16, 31])
def test_an_empty_range_reads_nothing(position: int):
    pages, table_BP = paged([torch.randn(HEADS, T, WIDTH)], 16)
    assert read_pages(pages, table_BP[0], position, position).shape == (1, HEADS, 0, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("table", [[0, 1, 2, 3, 4], [4, 1, 2, 0, 3]])
@pytest.mark.parametrize(("page_size", "length"), [(8, 37), (8, 16), (8, 0), (40, 40), (40, 17)])
def test_chunks_hold_every_position_once(page_size, length, table, transposed, dtype, monkeypatch):
    """Page by page, and a large page in parts."""
    monkeypatch.setattr(paging, "WIDE", 16 * HEADS * WIDTH)
    pages = torch.randn(5, HEADS, page_size, WIDTH).to(dtype)
    rows_HTD = pages[table].transpose(0, 1).reshape(HEADS, -1, WIDTH)[:, :length].float()
    if transposed:
        pages = pages.mT.contiguous().mT
    seen = []
    for span, wide_HnD in wide_chunks(pages, torch.tensor(table), length):
        assert torch.equal(wide_HnD, rows_HTD[:, span])
        assert wide_HnD.dtype == torch.float32
        seen += range(length)[span]
    assert seen == list(range(length))


def test_a_ring_gets_the_last_tokens_and_the_pages_of_some_heads_all(run):
    """Of pieces that are longer and shorter than the ring, and of one token."""
    N, size, B, capacity = 16, 2, 3, 100
    cache, part = Cache(B, capacity, N), Cache(B, size * N, N)
    table_BP = (torch.arange(B)[:, None] * size + torch.arange(cache.table_BP.shape[1]) % size).int()
    home_pages = [torch.full((len(x), 1, *x.shape[2:]), torch.nan) for x in (cache.key_PHND, cache.value_PHNE)]
    heads = HeadPages(torch.tensor([-1, 0], dtype=torch.int32), *home_pages)
    ring, ends = Ring(part.key_PHND, part.value_PHNE, table_BP, heads), [0] * B
    for count in ([70, 3, 0], [1, 1, 1], [9, 20, 33]):
        key, value = new_tokens(B, max(count), count)
        cache.append(run, key, value, ends, count, ring=ring)
        ends = [end + new for end, new in zip(ends, count, strict=True)]
    for row, end in enumerate(ends):
        both = (cache.key_PHND, ring.key_PHND, heads.key_PRND), (cache.value_PHNE, ring.value_PHNE, heads.value_PRNE)
        for pages, near, home in both:
            expected = cache.read(pages, row)[:, :end]
            assert expected.isfinite().all()
            assert torch.equal(cache.read(home, row)[0, :end], expected[1])
            for position in range(max(0, end - size * N), end):
                assert torch.equal(near[table_BP[row, position // N], :, position % N], expected[:, position])


@pytest.mark.parametrize(("own", "dtype"), [([3, 1, 0], torch.float), ([1, 1, 1], torch.half)])
def test_the_rotation_appends_what_it_makes(kernel_device, own: list[int], dtype: torch.dtype):
    """As `append` would after it: keys and values bit for bit, and norms within their roundings."""
    pytest.importorskip("triton")
    B, T, X = len(own), max(own), 6
    whole = torch.randn(B, T, (X + H) * D + H * E).to(dtype).to(kernel_device)
    query, key, value = whole.split([X * D, H * D, H * E], 2)
    rows = [part.view(B, T, heads, -1) for part, heads in ((query, X), (key, H), (value, H))]
    angle, weight = torch.rand(B, T, D, device=kernel_device).to(dtype), torch.rand(D, device=kernel_device).to(dtype)
    caches = [Cache(B, 20, 4, dtype=dtype) for _ in range(2)]
    caches[1].table_BP, start = caches[0].table_BP, [2, 7, 5]
    words = [torch.tensor(numbers, dtype=torch.int32, device=kernel_device) for numbers in (start, own)]
    pages = [(c.key_PHND, c.value_PHNE, c.norm_PHN, c.table_BP) for c in caches]
    pages = [[tensor.to(kernel_device) for tensor in tensors] for tensors in pages]
    operands = *rows[:2], angle, angle, weight, weight, 1e-6
    plain = rotary.triton(*operands)
    append.triton(plain[1], rows[2].transpose(1, 2), *words, *pages[0])
    both = rotary.triton(*operands, appending=Appending(rows[2], *words, *pages[1]))
    assert all(map(torch.equal, both, plain))
    for alone, together in zip(pages[0][:2], pages[1][:2], strict=True):
        torch.testing.assert_close(together, alone, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(pages[1][2], pages[0][2], rtol=norm_bound(rows[1]), atol=0, equal_nan=True)
    assert int(pages[1][2].isfinite().sum()) == H * sum(own)
