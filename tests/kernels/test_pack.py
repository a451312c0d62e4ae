"""Packing: gathering positions of the paged cache (Reorg)."""

import pytest
import torch

from sfi_kernels.pack import pack
from tests.fakes import paged

H, D = 2, 3


@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
def test_each_head_gets_its_own_positions_of_its_own_request(page_size: int):
    rows = [torch.randn(H, 100, D), torch.randn(H, 33, D)]
    pages, table_BP = paged(rows, page_size)
    index = torch.tensor(
        [[[0, 1, 15, 16, 99], [2, 31, 63, 64, 98]], [[0, 1, 2, 3, 32], [5, 6, 7, 16, 31]]],
        dtype=torch.int32,
    )
    out = torch.full((2, H, 5, D), torch.nan)
    pack(pages, table_BP, index, out)
    for b, row in enumerate(rows):
        for h in range(H):
            assert torch.equal(out[b, h], row[h, index[b, h].long()])


def test_rows_before_the_padding_are_right_and_the_padding_reads_no_other_request():
    rows = [torch.randn(H, 20, D), torch.randn(H, 20, D)]
    pages, table_BP = paged(rows, 8)
    index = torch.tensor([[[3, 9, -1], [17, -1, -1]]], dtype=torch.int32)
    out = torch.full((1, H, 3, D), torch.nan)
    pack(pages, table_BP[1:], index, out)
    assert torch.equal(out[0, 0, :2], rows[1][0, [3, 9]])
    assert torch.equal(out[0, 1, :1], rows[1][1, [17]])


def test_rows_of_the_buffer_beyond_the_index_stay_as_they_are():
    pages, table_BP = paged([torch.randn(H, 20, D)], 8)
    out = torch.full((1, H, 6, D), 7.0)
    pack(pages, table_BP, torch.zeros(1, H, 2, dtype=torch.int32), out)
    assert (out[:, :, 2:] == 7).all()
    assert (out[:, :, :2] != 7).all()
