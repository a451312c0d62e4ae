"""Packing from two tiers gives what packing from the device gives, and brings no row twice."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sfi_core.state.kv_cache import KVCache
from sfi_core.state.layer_pages import PackedSegment
from tests.fakes import int32
from tests.schedules import Lazy
from tests.two_tier import CAPACITY, SIDES, B, D, E, H, Written

pytestmark = pytest.mark.usefixtures("poisoned_host_memory")


class Packing:
    """The same selections packed by a two-tier store and by a cache that has everything."""

    def __init__(self, side: Any, *count: int) -> None:
        self.written, self.cache = Written(side), KVCache(B, CAPACITY)
        self.written.append(*count, into=[self.cache])
        self.segments = [PackedSegment(B, 9, s.pages(0)) for s in (self.written.store, self.cache)]

    def pack(self, rows: Sequence[int], sink: Sequence[int], index: Any, heads: Any = None) -> torch.Tensor:
        """Pack by both; return how many rows the two-tier store brought."""
        index_RHK = torch.tensor(index, dtype=torch.int32)
        heads_RH = None if heads is None else torch.tensor(heads)
        stores = (self.written.store, self.cache)
        brought, nothing = [
            store.pack_into(segment, 0, int32(rows), int32(sink), index_RHK, max(sink), heads_RH)
            for store, segment in zip(stores, self.segments, strict=True)
        ]
        assert nothing is None
        return brought.rows_RH

    def assert_same(self) -> None:
        """Compare what counts of both segments, bit for bit."""
        self.written.store.ready(0)
        ours, theirs = self.segments
        assert torch.equal(ours.length_BH, theirs.length_BH)
        for row in range(B):
            for head in range(H):
                count = int(theirs.length_BH[row, head])
                for name in ("key_BHSD", "value_BHSE", "position_BHS"):
                    found, expected = (getattr(x, name)[row, head, :count] for x in (ours, theirs))
                    assert torch.equal(found, expected), name


@pytest.mark.parametrize("side", SIDES)
def test_packing_from_the_host_gives_what_packing_from_the_device_gives(side: str):
    """And brings the rows, sinks included, that were not in the segment before, and no others."""
    packing = Packing(SIDES[side](), 41, 12, 33)
    first = [[[5, 9, 30], [6, 7, -1]], [[3, -1, -1], [2, 4, 6]]]
    rows_RH = packing.pack([0, 2], [2, 2], first)
    packing.assert_same()
    assert rows_RH.tolist() == [[5, 4], [3, 5]]
    second = [[[5, 11, 30], [6, 7, 8]], [[4, 5, 6], [2, 4, 6]]]
    rows_RH = packing.pack([0, 2], [2, 2], second)
    packing.assert_same()
    assert rows_RH.tolist() == [[1, 1], [3, 0]]


@pytest.mark.parametrize("side", SIDES)
def test_heads_that_are_not_packed_keep_their_rows(side: str):
    packing = Packing(SIDES[side](), 41, 12, 33)
    packing.pack([0, 1], [2, 0], [[[5, 9], [6, 7]], [[3, 4], [2, -1]]])
    rows_RH = packing.pack([0, 1], [2, 0], [[[9, 10], [1, 2]], [[0, 1], [2, 3]]], [[True, False], [False, True]])
    packing.assert_same()
    assert rows_RH.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("side", SIDES)
def test_rows_that_come_late_are_the_last_selection(side: str):
    packing = Packing(SIDES[side](), 41, 12, 33)
    packing.pack([0], [2], [[[5, 9], [6, 7]]])
    packing.written.append(3, 3, 3, into=[packing.cache])
    late = packing.pack([0], [2], [[[9, 30], [6, 31]]])
    packing.assert_same()
    assert late.tolist() == [[1, 1]]


@pytest.mark.parametrize("side", SIDES)
def test_sinks_of_a_prompt_shorter_than_a_page_are_packed(side: str):
    """Their page is not complete, nobody has asked the host for it before."""
    packing = Packing(SIDES[side](), 3, 6, 1)
    nothing = [[[], []]] * B
    rows_RH = packing.pack([0, 1, 2], [3, 6, 1], nothing)
    packing.assert_same()
    assert rows_RH.tolist() == [[3, 3], [6, 6], [1, 1]]
    packing.written.append(2, 2, 2, into=[packing.cache])
    packing.pack([0, 1, 2], [3, 6, 1], nothing)
    packing.assert_same()
    packing.written.assert_found()


def test_a_segment_grows_to_what_is_packed():
    packing = Packing(Lazy(), 41, 12, 33)
    packing.pack([0], [2], [[[5, 9], [6, 7]]])
    packing.pack([0], [2], [[list(range(3, 15)), list(range(5, 17))]])
    packing.assert_same()


def test_a_new_request_takes_nothing_from_the_one_before_it():
    """A recall for the row's last request ends before the row is emptied."""
    packing = Packing(Lazy(), 41, 12, 33)
    packing.pack([1], [2], [[[5, 6], [6, 7]]])
    alone, key = packing.written.store.row(1), torch.randn(1, H, 30, D)
    segment, value = packing.segments[0].row(1), torch.randn(1, H, 30, E)
    alone.append(0, key, value, int32([0]), int32([30]), [0], [30])
    brought = alone.pack_into(segment, 0, int32([0]), int32([2]), int32([5, 6, 6, 7]).view(1, 2, 2), 2)
    alone.ready(0)
    assert brought.rows_RH.tolist() == [[4, 4]]
    for head, positions in enumerate(([0, 1, 5, 6], [0, 1, 6, 7])):
        assert torch.equal(segment.key_BHSD[0, head, :4], key[0, head, positions])


def test_what_follows_a_recall_sees_its_counts():
    packing, seen = Packing(Lazy(), 41, 12, 33), []
    store, segment = packing.written.store, packing.segments[0]
    index = int32([5, 9, 6, -1]).view(1, 2, 2)
    brought = store.pack_into(segment, 0, int32([0]), int32([2]), index, 2)
    brought.then(lambda: seen.append(brought.rows_RH.tolist()))
    assert seen == []
    store.ready(0)
    assert seen == [[[4, 3]]]
    assert brought.row_bytes == (D + E) * 4
