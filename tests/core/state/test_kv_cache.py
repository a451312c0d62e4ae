"""The paged KV cache: what is appended is found again, for every request, page size and dtype."""

from collections import Counter

import pytest
import torch

from sfi_core.state.kv_cache import GROWTH, KVCache
from sfi_kernels.launch import counting
from sfi_kernels.pages import read_pages
from tests.covering import each_value
from tests.fakes import int32
from tests.two_tier import B, D, E, H, Written, norms_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def filled(capacity: int, page_size: int | None = None, dtype=torch.float32, backend: str = "torch") -> Written:
    return Written(store=KVCache(B, capacity, page_size, backend), dtype=dtype)


@pytest.mark.parametrize(("page_size", "dtype"), each_value([None, 1, 5, 16, 64], DTYPES))
def test_tokens_are_found_again_across_page_borders(page_size: int | None, dtype: torch.dtype):
    written = filled(40, page_size, dtype)
    for count in ((17, 17, 17), (1, 1, 1), (15, 0, 7), (7, 20, 1)):
        written.append(*count)
        written.assert_found()


@pytest.mark.parametrize("page_size", [None, 5])
def test_the_kernel_appends_what_the_reference_does(page_size: int | None):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the tokens of these tests are on the CPU")
    written = filled(40, page_size, backend="triton")
    with counting(launches := Counter()):
        for count in ((17, 3, 9), (1, 0, 1)):
            written.append(*count)
            written.assert_found()
    assert launches == {"append": 2}


def test_nothing_is_written_beyond_a_request_s_tokens():
    written = filled(20, 5)
    written.append(12, 1, 7)
    written.append(1, 1, 1)
    pages, table = written.store.layers[0], written.store.block_table_BP
    for row, key in enumerate(written.keys):
        rest = read_pages(pages.key_PHND, table[row], key.shape[1], 20)
        assert rest.isnan().all()


@pytest.mark.parametrize(("capacity", "page_size", "room"), [(10, None, 10), (10, 4, 12)])
def test_one_token_too_many_is_refused(capacity: int, page_size: int | None, room: int):
    written = filled(capacity, page_size)
    written.append(room, 1, 1)
    written.assert_found()
    with pytest.raises(ValueError, match=f"^cache holds {room} tokens a request, got {room + 1}$"):
        written.append(1, 1, 1)


@pytest.mark.parametrize(("wanted", "page_size"), [(11, None), (2000, 1), (30, 5)])
def test_a_grown_cache_keeps_what_it_held(wanted: int, page_size: int | None):
    written, second = filled(10, page_size), filled(10, page_size)
    second.store = written.store
    written.append(10, 4, 7)
    second.append(5, 3, 4, layer=1)
    written.store.grow(wanted)
    assert written.store.capacity >= wanted + min(GROWTH, wanted)
    written.append(1, 7, 4)
    written.assert_found()
    second.assert_found(1)


def test_growing_adds_pages_behind_each_request_s_own():
    """The old page numbers stay, so that nothing moves between pages; to what fits nothing happens."""
    written = filled(10, 5)
    written.append(10, 4, 7)
    before, pages = written.store.block_table_BP, written.store.layers[0].key_PHND
    written.store.grow(10)
    assert written.store.layers[0].key_PHND is pages
    written.store.grow(11)
    table = written.store.block_table_BP
    assert torch.equal(table[:, :2], before)
    assert table.dtype == torch.int32
    assert table.shape[1] * 5 == written.store.capacity
    assert sorted(table.flatten().tolist()) == list(range(table.numel()))
    assert written.store.layers[0].norm_PHN.shape == (table.numel(), H, 5)


def test_a_page_of_a_given_size_keeps_it():
    """Even where one page was enough so far: the kernels are told of the size once."""
    written = filled(10, 16)
    written.append(10, 4, 7)
    written.store.grow(17)
    assert written.store.page_size == 16
    assert written.store.layers[0].key_PHND.shape[2] == 16


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_requests_that_begin_alike_share_the_pages_of_that_beginning(backend: str):
    """They are written once; who takes over a row, or reaches further than was planned, leaves them as they are."""
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the tokens of these tests are on the CPU")
    common, store = 8, KVCache(B, 20, 4, backend, shared=8)
    key, value = torch.randn(1, H, common, D), torch.randn(1, H, common, E)
    store.share(0, key, value)
    written = Written(store=store)
    written.append(12, 9, 10)  # of which 8 are said to be there, and are not taken
    for rows, beginning in ((written.keys, key), (written.values, value)):
        for row in rows:
            row[:, :common] = beginning[0]
    written.assert_found()
    assert store.layers[0].key_PHND.shape[0] == 2 + B * 3
    assert store.capacity == 20
    own_key, own_value = torch.randn(1, H, 6, D), torch.randn(1, H, 6, E)
    store.row(1).append(0, own_key, own_value, int32([0]), int32([14]), [0], [14])
    written.keys[1] = torch.cat([key[0], own_key[0]], 1)
    written.values[1] = torch.cat([value[0], own_value[0]], 1)
    written.assert_found()
    store.grow(40)
    written.append(10, 20, 1)
    written.assert_found()


@pytest.mark.parametrize("page_size", [None, 5, 64])
def test_norms_of_pages_are_those_of_their_requests(page_size: int | None):
    written = filled(20, page_size)
    written.append(12, 20, 17)
    table = written.store.block_table_BP[torch.tensor([2, 0])]
    pages = table[:, None] * H + torch.arange(H)[:, None].int()
    norms = written.store.norms(0, pages)
    assert norms.shape == (2, H, written.store.capacity)
    expected = torch.stack([written.keys[row][:, :12].norm(dim=-1) for row in (2, 0)])
    torch.testing.assert_close(norms[:, :, :12], expected)


def test_one_page_per_request_is_a_contiguous_tensor():
    written = filled(20)
    written.append(6, 6, 6)
    pages = written.store.layers[0]
    assert pages.key_PHND.shape == (B, H, 20, D)
    assert pages.value_PHNE.shape == (B, H, 20, E)
    assert pages.key_PHND.is_contiguous()
    assert torch.equal(pages.key_PHND[:, :, :6], torch.stack(written.keys))


@pytest.mark.parametrize("grown", [0, 100])
@pytest.mark.parametrize("page_size", [None, 5, 16])
def test_a_row_is_one_requests_part_of_the_same_memory(page_size: int | None, grown: int):
    written = filled(20, page_size)
    written.append(4, 12, 9)
    written.store.grow(grown)
    written.append(0, 6, 0)
    row = written.store.row(1)
    assert (row.batch, row.capacity) == (1, written.store.capacity)
    assert torch.equal(row.keys(0, 0, 2, 18)[0], written.keys[1][:, 2:])
    key, value = torch.randn(1, H, 7, D), torch.randn(1, H, 7, E)
    row.append(0, key, value, int32([0]), int32([7]), [0], [7])
    written.keys[1], written.values[1] = key[0], value[0]
    written.assert_found()
    torch.testing.assert_close(norms_of(row, 0, 0, 7), key[0].norm(dim=-1))
