"""The paged KV cache: what is appended is found again, for every request, page size and dtype."""

from collections import Counter

import pytest
import torch

from sfi_core.state.kv_cache import GROWTH, KVCache
from sfi_kernels.launch import counting
from sfi_kernels.pages import read_pages
from tests.covering import each_value
from tests.fakes import int32

pytestmark = pytest.mark.usefixtures("poisoned_memory")
B, H, D, E = 3, 2, 4, 6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Written:
    """A cache and, beside it, plain lists of what was appended to each request."""

    def __init__(self, capacity: int, page_size: int | None = None, dtype=torch.float32, backend="torch"):
        self.cache = KVCache(B, capacity, page_size, backend)
        self.dtype = dtype
        self.keys = [torch.empty(H, 0, D, dtype=dtype) for _ in range(B)]
        self.values = [torch.empty(H, 0, E, dtype=dtype) for _ in range(B)]

    def append(self, *count: int, layer: int = 0) -> None:
        """Append `count[b]` tokens to request b, left-padded with NaN to a common length."""
        key = torch.full((B, H, max(count), D), torch.nan, dtype=self.dtype)
        value = torch.full((B, H, max(count), E), torch.nan, dtype=self.dtype)
        start = [rows.shape[1] for rows in self.keys]
        for row, new in enumerate(count):
            own = slice(max(count) - new, None)
            key[row, :, own] = torch.randn(H, new, D).to(self.dtype)
            value[row, :, own] = torch.randn(H, new, E).to(self.dtype)
            self.keys[row] = torch.cat([self.keys[row], key[row, :, own]], 1)
            self.values[row] = torch.cat([self.values[row], value[row, :, own]], 1)
        self.cache.append(layer, key, value, int32(start), int32(count), start, count)

    def assert_found(self, layer: int = 0) -> None:
        """Compare every cached token, and its key's norm, with what was appended."""
        pages, table = self.cache.layers[layer], self.cache.block_table_BP
        for row, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            length = key.shape[1]
            assert torch.equal(read_pages(pages.key_PHND, table[row], 0, length)[0], key)
            assert torch.equal(read_pages(pages.value_PHNE, table[row], 0, length)[0], value)
            expected = key.double().pow(2).sum(-1).sqrt()
            norms = self.cache.norms(layer, [row], length)[0]
            torch.testing.assert_close(norms.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("page_size", "dtype"), each_value([None, 1, 5, 16, 64], DTYPES))
def test_tokens_are_found_again_across_page_borders(page_size: int | None, dtype: torch.dtype):
    """Position j is the j-th token of the request's own prompt: left padding is dropped."""
    written = Written(40, page_size, dtype)
    for count in ((17, 17, 17), (1, 1, 1), (15, 0, 7), (7, 20, 1)):
        written.append(*count)
        written.assert_found()


@pytest.mark.parametrize("page_size", [None, 5])
def test_the_kernel_appends_what_the_reference_does(page_size: int | None):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the tokens of these tests are on the CPU")
    written = Written(40, page_size, backend="triton")
    with counting(launches := Counter()):
        for count in ((17, 3, 9), (1, 0, 1)):
            written.append(*count)
            written.assert_found()
    assert launches == {"append": 2}


def test_nothing_is_written_beyond_a_request_s_tokens():
    written = Written(20, 5)
    written.append(12, 1, 7)
    written.append(1, 1, 1)
    pages, table = written.cache.layers[0], written.cache.block_table_BP
    for row, key in enumerate(written.keys):
        rest = read_pages(pages.key_PHND, table[row], key.shape[1], 20)
        assert rest.isnan().all()


@pytest.mark.parametrize(("capacity", "page_size", "room"), [(10, None, 10), (10, 4, 12)])
def test_one_token_too_many_is_refused(capacity: int, page_size: int | None, room: int):
    """Several pages round the room up to whole pages."""
    written = Written(capacity, page_size)
    written.append(room, 1, 1)
    written.assert_found()
    with pytest.raises(ValueError, match=f"^cache holds {room} tokens a request, got {room + 1}$"):
        written.append(1, 1, 1)


@pytest.mark.parametrize(("wanted", "page_size"), [(11, None), (2000, 1), (30, 5)])
def test_a_grown_cache_keeps_what_it_held(wanted: int, page_size: int | None):
    written, second = Written(10, page_size), Written(10, page_size)
    second.cache = written.cache
    written.append(10, 4, 7)
    second.append(5, 3, 4, layer=1)
    written.cache.grow(wanted)
    assert written.cache.capacity >= wanted + min(GROWTH, wanted)
    written.append(1, 7, 4)
    written.assert_found()
    second.assert_found(1)


def test_growing_to_what_fits_does_nothing():
    written = Written(10)
    written.append(10, 10, 10)
    before = written.cache.layers[0].key_PHND
    written.cache.grow(10)
    assert written.cache.layers[0].key_PHND is before
    assert written.cache.capacity == 10


def test_growing_adds_pages_behind_each_request_s_own():
    """The old page numbers stay, so that nothing moves between pages."""
    written = Written(10, 5)
    written.append(10, 4, 7)
    before = written.cache.block_table_BP
    written.cache.grow(11)
    table = written.cache.block_table_BP
    assert torch.equal(table[:, :2], before)
    assert table.dtype == torch.int32
    assert table.shape[1] * 5 == written.cache.capacity
    assert sorted(table.flatten().tolist()) == list(range(table.numel()))
    assert written.cache.layers[0].norm_PHN.shape == (table.numel(), H, 5)


def test_a_page_of_a_given_size_keeps_it():
    """Even where one page was enough so far: the kernels are told of the size once."""
    written = Written(10, 16)
    written.append(10, 4, 7)
    written.cache.grow(17)
    assert written.cache.page_size == 16
    assert written.cache.layers[0].key_PHND.shape[2] == 16


@pytest.mark.parametrize("page_size", [None, 5, 64])
def test_norms_of_pages_are_those_of_their_requests(page_size: int | None):
    written = Written(20, page_size)
    written.append(12, 20, 17)
    table = written.cache.block_table_BP[torch.tensor([2, 0])]
    pages = table[:, None] * H + torch.arange(H)[:, None].int()
    norms = written.cache.norms_of(0, pages)
    assert norms.shape == (2, H, written.cache.capacity)
    assert torch.equal(norms[:, :, :12], written.cache.norms(0, [2, 0], 12))


def test_norms_of_one_page_are_a_view():
    written = Written(20)
    written.append(6, 6, 6)
    norms = written.cache.norms(0, [1, 2], 6)
    written.cache.layers[0].norm_PHN[1:] = 3
    assert (norms == 3).all()


def test_one_page_per_request_is_a_contiguous_tensor():
    """PyTorch's SDPA reads the page without a copy."""
    written = Written(20)
    written.append(6, 6, 6)
    pages = written.cache.layers[0]
    assert pages.key_PHND.shape == (B, H, 20, D)
    assert pages.value_PHNE.shape == (B, H, 20, E)
    assert pages.key_PHND.is_contiguous()
    assert torch.equal(pages.key_PHND[:, :, :6], torch.stack(written.keys))


def test_a_copy_of_a_cache_is_its_own():
    cache = KVCache(1, 8)
    start, count = torch.tensor([0], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    ones = torch.ones(1, 1, 3, 2)
    cache.append(0, ones, ones, start, count, start.tolist(), count.tolist())
    other = cache.copy()
    other.layers[0].key_PHND.zero_()
    other.grow(20)
    assert bool((cache.keys(0, 0, 0, 3) == 1).all())
    assert (cache.capacity, len(cache.layers)) == (8, 1)


@pytest.mark.parametrize("grown", [0, 100])
@pytest.mark.parametrize("page_size", [None, 5, 16])
def test_a_row_is_one_requests_part_of_the_same_memory(page_size: int | None, grown: int):
    written = Written(20, page_size)
    written.append(4, 12, 9)
    written.cache.grow(grown)
    written.append(0, 6, 0)
    row = written.cache.row(1)
    assert (row.batch, row.capacity) == (1, written.cache.capacity)
    assert torch.equal(row.keys(0, 0, 2, 18)[0], written.keys[1][:, 2:])
    key, value = torch.randn(1, H, 7, D), torch.randn(1, H, 7, E)
    row.append(0, key, value, int32([0]), int32([7]), [0], [7])
    written.keys[1], written.values[1] = key[0], value[0]
    written.assert_found()
    torch.testing.assert_close(row.norms(0, [0], 7)[0], key[0].norm(dim=-1))
