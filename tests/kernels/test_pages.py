"""Reading a request's rows out of shuffled pages."""

import pytest
import torch

from sfi_kernels import pages as paging
from sfi_kernels.pages import read_pages, wide_chunks
from tests.fakes import paged

H, T, D = 2, 40, 3


@pytest.mark.parametrize("page_size", [1, 7, 16, 40, 64])
@pytest.mark.parametrize(("start", "stop"), [(0, 40), (0, 1), (39, 40), (3, 5), (6, 8), (7, 14), (15, 33), (16, 32)])
def test_the_rows_are_those_of_the_request_wherever_pages_end(page_size: int, start: int, stop: int):
    rows = [torch.randn(H, T, D), torch.randn(H, 23, D)]
    pages, table_BP = paged(rows, page_size, spare_pages=1)
    read = read_pages(pages, table_BP[0], start, stop)
    assert torch.equal(read, rows[0][None, :, start:stop])


def test_pages_of_numbers_read_like_pages_of_vectors():
    """The key norms have no D."""
    norms = torch.rand(H, T)
    pages, table_BP = paged([norms], 16)
    assert torch.equal(read_pages(pages, table_BP[0], 5, 37), norms[None, :, 5:37])


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (3, 19), (20, 40), (21, 40)])
def test_rows_within_one_page_are_not_copied(start: int, stop: int):
    """On a CPU a request has one page, which may be full."""
    pages, table_BP = paged([torch.randn(H, T, D)], 20)
    read = read_pages(pages, table_BP[0], start, stop)
    assert read.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()


@pytest.mark.parametrize("position", [0, 16, 31])
def test_an_empty_range_reads_nothing(position: int):
    pages, table_BP = paged([torch.randn(H, T, D)], 16)
    assert read_pages(pages, table_BP[0], position, position).shape == (1, H, 0, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("table", [[0, 1, 2, 3, 4], [4, 1, 2, 0, 3]])
@pytest.mark.parametrize(("page_size", "length"), [(8, 37), (8, 16), (8, 0), (40, 40), (40, 17)])
def test_chunks_hold_every_position_once(
    page_size: int, length: int, table: list[int], transposed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Page by page, and a large page in parts."""
    monkeypatch.setattr(paging, "WIDE", 16 * H * D)
    pages = torch.randn(5, H, page_size, D).to(dtype)
    rows_HTD = pages[table].transpose(0, 1).reshape(H, -1, D)[:, :length].float()
    if transposed:
        pages = pages.mT.contiguous().mT
    seen = []
    for span, wide_HnD in wide_chunks(pages, torch.tensor(table), length):
        assert torch.equal(wide_HnD, rows_HTD[:, span])
        assert wide_HnD.dtype == torch.float32
        seen += range(length)[span]
    assert seen == list(range(length))
