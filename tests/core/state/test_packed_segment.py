"""The packed segment: refreshed in place, shrinking and growing."""

from collections import Counter

import pytest
import torch

from sfi_core.state.kv_cache import KVCache
from sfi_core.state.layer_pages import PackedSegment
from sfi_kernels.launch import counting
from tests.fakes import int32

pytestmark = pytest.mark.usefixtures("poisoned_memory")
B, H, D, E, SINK, T = 2, 2, 3, 5, 2, 30


class Packed:
    def __init__(self, rows: int, page_size: int | None = 8, backend: str = "torch") -> None:
        self.key, self.value = torch.randn(B, H, T, D), torch.randn(B, H, T, E)
        self.cache = KVCache(B, T, page_size, backend)
        start, count = int32([0] * B), int32([T] * B)
        both = start.tolist(), count.tolist()
        self.pages = self.cache.append(0, self.key, self.value, start, count, *both)
        self.segment = PackedSegment(B, rows, *self.pages.tensors[:2])

    def repack(self, row: int, index: list[list[int]], sink: int = SINK) -> None:
        self.repack_all([row], [index], [sink])

    def repack_all(self, rows: list[int], index: list[list[list[int]]], sinks: list[int]) -> None:
        index_RHK = torch.tensor(index, dtype=torch.int32)
        request_R, sink_R = int32(rows), int32(sinks)
        self.cache.pack_into(self.segment, 0, request_R, sink_R, index_RHK, max(sinks))

    def assert_holds(self, row: int, *heads: list[int]) -> None:
        for h, positions in enumerate(heads):
            n = len(positions)
            held = self.segment.position_BHS[row, h].tolist()
            assert held == positions + [-1] * (len(held) - n)
            assert self.segment.length_BH[row, h] == n
            assert torch.equal(self.segment.key_BHSD[row, h, :n], self.key[row, h, positions])
            assert torch.equal(self.segment.value_BHSE[row, h, :n], self.value[row, h, positions])


@pytest.mark.parametrize("page_size", [None, 1, 8, 64])
def test_sinks_come_first_then_the_selected_of_each_head(page_size: int | None):
    packed = Packed(6, page_size)
    packed.repack(0, [[5, 9, 20], [2, 3, 29]])
    packed.assert_holds(0, [0, 1, 5, 9, 20], [0, 1, 2, 3, 29])


def test_a_smaller_selection_forgets_the_larger_one():
    packed = Packed(6)
    packed.repack(0, [[5, 9, 20, 21], [2, 3, 28, 29]])
    packed.repack(0, [[7], [8]])
    packed.assert_holds(0, [0, 1, 7], [0, 1, 8])
    packed.repack(0, [[5, 9, 20, 22], [2, 3, 27, 29]])
    packed.assert_holds(0, [0, 1, 5, 9, 20, 22], [0, 1, 2, 3, 27, 29])


def test_the_kernel_packs_what_the_reference_does():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the tokens of these tests are on the CPU")
    packed = Packed(3, backend="triton")
    with counting(launches := Counter()):
        packed.repack_all([1, 0], [[[4, 6], [6, -1]], [[5, 9], [2, 3]]], [0, 2])
    assert launches == {"pack": 1}
    packed.assert_holds(0, [0, 1, 5, 9], [0, 1, 2, 3])
    packed.assert_holds(1, [4, 6], [6])


def test_a_new_segment_is_empty():
    assert Packed(6).segment.length_BH.tolist() == [[0, 0], [0, 0]]
    assert (Packed(6).segment.position_BHS == -1).all()


def test_a_segment_grows_with_a_cache_that_grew():
    """A run of unknown length plans its rows before it knows them; the other requests stay as they are."""
    packed = Packed(4)
    packed.repack(1, [[4, 6], [5, 7]])
    packed.repack(0, [[5, 9, 20, 21], [2, 3, 28, -1]])
    packed.assert_holds(0, [0, 1, 5, 9, 20, 21], [0, 1, 2, 3, 28])
    packed.assert_holds(1, [0, 1, 4, 6], [0, 1, 5, 7])


def test_a_row_is_one_requests_part_emptied():
    packed = Packed(6)
    packed.repack_all([0, 1], [[[5, 9], [2, 3]], [[7, 8], [6, 9]]], [2, 2])
    row = packed.segment.row(1)
    packed.assert_holds(1, [], [])
    packed.assert_holds(0, [0, 1, 5, 9], [0, 1, 2, 3])
    index = torch.tensor([[[10, 11], [12, 13]]], dtype=torch.int32)
    packed.cache.row(1).pack_into(row, 0, int32([0]), int32([2]), index, 2)
    packed.assert_holds(1, [0, 1, 10, 11], [0, 1, 12, 13])
    packed.assert_holds(0, [0, 1, 5, 9], [0, 1, 2, 3])
