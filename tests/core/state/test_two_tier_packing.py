"""The two-tier store against plain tensors: every token is found again, and packed as from the device."""

from collections import Counter

import pytest
import torch

from sfi_core.errors import ConfigError
from sfi_core.state.kv_cache import KVCache
from sfi_core.state.layer_pages import PackedSegment
from sfi_kernels.launch import counting
from sfi_kernels.pages import read_pages
from tests.covering import each_value
from tests.fakes import int32
from tests.schedules import Lazy
from tests.two_tier import CAPACITY, RING, SIDES, B, D, E, H, N, Written

pytestmark = pytest.mark.usefixtures("poisoned_host_memory")


class Packing:
    """The same selections packed by a two-tier store and by a cache that has everything."""

    def __init__(self, side, *count: int) -> None:
        self.written, self.cache = Written(side), KVCache(B, CAPACITY)
        self.written.append(*count, into=[self.cache])
        self.segments = [PackedSegment(B, 9, *s.pages(0).tensors[:2]) for s in (self.written.store, self.cache)]

    def pack(self, rows, sink, index, heads=None) -> torch.Tensor:
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
        self.written.store.ready(0)
        ours, theirs = self.segments
        assert torch.equal(ours.length_BH, theirs.length_BH)
        for row in range(B):
            for head in range(H):
                count = int(theirs.length_BH[row, head])
                for name in ("key_BHSD", "value_BHSE", "position_BHS"):
                    rows, expected = (getattr(x, name)[row, head, :count] for x in (ours, theirs))
                    assert torch.equal(rows, expected), name


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


PIECES = {
    "longer than the ring": [(41, 41, 41)],
    "shorter than the ring": [(7, 5, 9)],
    "pieces that end inside a page": [(6, 6, 6), (9, 9, 9), (3, 3, 3)],
    "pieces that end with a page": [(8, 8, 8), (4, 4, 4)],
    "ragged": [(41, 3, 17), (1, 20, 4)],
    "single tokens across page borders": [(6, 30, 1)] + 11 * [(1, 1, 1)],
    "rows that rest": [(13, 9, 21), (1, 0, 1), (0, 1, 0), (5, 0, 16)],
}


@pytest.mark.parametrize(("pieces", "side", "resident"), each_value(PIECES, SIDES, [(), (1,), (0, 1)]))
def test_every_token_is_found_again(pieces: str, side: str, resident: tuple[int, ...]):
    written = Written(SIDES[side](), resident)
    for count in PIECES[pieces]:
        written.append(*count)
        written.assert_found()


def test_the_triton_backend_keeps_what_the_reference_keeps():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the tokens of these tests are on the CPU")
    written = Written(backend="triton", page_size=16)
    with counting(launches := Counter()):
        for count in PIECES["ragged"]:
            written.append(*count)
            written.assert_found()
    assert launches == {"append": 2}


@pytest.mark.parametrize("side", SIDES)
def test_keys_come_from_the_ring_and_from_the_host(side: str):
    written = Written(SIDES[side]())
    written.append(41, 3, 17)
    for row, key in enumerate(written.keys):
        length = key.shape[1]
        for start in range(length):
            for stop in {start + 1, min(start + 7, length), length}:
                keys = written.store.keys(0, row, start, stop)
                assert torch.equal(keys[0], key[:, start:stop])


def test_norms_of_several_requests_come_in_one_tensor():
    written = Written()
    written.append(12, 20, 17)
    table = written.store.block_table_BP[torch.tensor([2, 0])]
    pages = table[:, None] * H + torch.arange(H)[:, None].int()
    norms = written.store.norms(0, pages)[:, :, :12]
    expected = torch.stack([written.keys[row][:, :12].norm(dim=-1) for row in (2, 0)])
    torch.testing.assert_close(norms, expected)


@pytest.mark.parametrize("side", SIDES)
def test_a_row_is_one_requests_part_of_the_same_memory(side: str):
    written = Written(SIDES[side](), resident=(1,))
    written.append(30, 17, 13)
    row, key, value = written.store.row(1), torch.randn(1, H, 26, D), torch.randn(1, H, 26, E)
    row.append(0, key, value, int32([0]), int32([26]), [0], [26])
    written.keys[1], written.values[1] = key[0], value[0]
    assert torch.equal(row.keys(0, 0, 3, 26), key[:, :, 3:])
    written.assert_found()
    written.append(1, 1, 1)
    written.assert_found()


def test_a_layer_that_is_resident_needs_no_host_memory():
    written = Written(resident=(0, 1))
    written.append(41, 3, 17)
    assert written.store.ring(0) is None
    assert written.store.host_bytes == 0
    written.assert_found()


def test_a_prompt_s_pages_come_to_the_device_for_its_next_piece():
    written = Written()
    written.append(41, 3, 17)
    for row, both in enumerate(zip(written.keys, written.values, strict=True)):
        length = both[0].shape[1]
        *staged, table_1P = written.store.staged(0, row, length)
        for pages, expected in zip(staged, both, strict=True):
            assert torch.equal(read_pages(pages, table_1P[0], 0, length)[0], expected)
    pages = sum(-(-length // N) for length in (41, 3, 17))
    assert written.store.traffic["streamed"] == pages * N * H * (D + E) * 4


def test_the_bytes_are_those_of_what_the_store_holds():
    """Ring, norms, resident heads, a prompt's staged pages, and a copy of a layer's segment."""
    written = Written(resident=(1,))
    written.append(41, 12, 33)
    store = written.store
    row, capacity = (D + E) * 4, -(-CAPACITY // N) * N
    fixed = B * RING * N * H * row + B * capacity * (H * 4 + row)
    assert (store.device_bytes, store.host_bytes) == (fixed, B * capacity * H * row)
    store.staged(0, 0, 41)
    stage = capacity * H * row
    assert store.device_bytes == fixed + stage
    segment = PackedSegment(B, 9, *store.pages(0).tensors[:2])
    store.pack_into(segment, 0, int32([0]), int32([2]), int32([5, 9]).view(1, 2, 1), 2)
    assert store.device_bytes == fixed + stage + B * H * (9 * (row + 4) + 4)


def test_a_longer_run_than_planned_is_refused():
    store = Written().store
    store.grow(72)  # whole pages
    with pytest.raises(ConfigError) as caught:
        store.grow(73)
    assert str(caught.value) == (
        "a run under kv_device_budget must state its length, got 73 tokens after room for 72; give max_new_tokens"
    )
