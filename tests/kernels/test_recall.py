"""Recall: what `pack` writes from device pages, from host pages and the rows of the old segment."""

import pytest
import torch

from sfi_kernels.pack import pack, recall
from tests.fakes import int32, paged

H, S, N = 2, 12, 16


@pytest.fixture(params=["torch", "triton"])
def run(request, kernel_device):
    """Recall in each backend; the first two tensors, the host pages, stay on the host."""
    if request.param == "torch":
        return recall.reference
    pytest.importorskip("triton")

    def on_device(*tensors: torch.Tensor, **marks: torch.Tensor) -> None:
        moved = [tensor.to(kernel_device) for tensor in tensors[2:]]
        hosts = [pages.pin_memory() if kernel_device == "cuda" else pages for pages in tensors[:2]]
        heads = {name: tensor.to(kernel_device) for name, tensor in marks.items()}
        recall.triton(*hosts, *moved, **heads)
        for tensor, result in zip(tensors[2:], moved, strict=True):
            tensor.copy_(result)

    return on_device


def selection(rows: list[list[list[int]]], K: int) -> torch.Tensor:
    return int32([[positions + [-1] * (K - len(positions)) for positions in heads] for heads in rows])


class Tiers:
    """Requests in host pages, their old segments packed; what must not be read is NaN."""

    def __init__(self, lengths: list[int], D=8, E=8, S=S, page_size=N, dtype=torch.float32):
        self.rows = [[torch.randn(H, T, w).to(dtype) for T in lengths] for w in (D, E)]
        (self.clean_key, self.table), (self.clean_value, _) = (paged(rows, page_size) for rows in self.rows)
        self.D, self.E, self.S, self.N, self.B = D, E, S, page_size, len(lengths)
        self.old = self.segment(self.B, dtype)

    def segment(self, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Make a segment that holds poison."""
        key, value = (torch.full((rows, H, self.S, width), torch.nan, dtype=dtype) for width in (self.D, self.E))
        position = torch.full((rows, H, self.S), -7, dtype=torch.int32)
        return key, value, position, torch.full((rows, H), -7, dtype=torch.int32)

    def pack(self, requests: list[int], index: torch.Tensor, sinks: list[int], into) -> None:
        pack.reference(self.clean_key, self.clean_value, self.table, int32(requests), index, int32(sinks), *into)
        key, value, position, _ = into
        for part in (key, value):  # rows that count for nothing may hold anything
            part.masked_fill_((position < 0)[..., None], torch.nan)

    def host(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.clean_key.clone(), self.clean_value.clone()

    def forget(self, pages: tuple[torch.Tensor, ...], request: int, head: int, reused: set) -> None:
        for token in reused:
            page = int(self.table[request, token // self.N])
            for part in pages:
                part[page, head, token % self.N] = torch.nan

    def recall(self, run, requests, index, sinks, pages=None, **marks):
        old = [part[int32(requests).clamp_min(0)] for part in self.old]
        self.into = self.segment(self.B, self.old[0].dtype)
        self.fetched = torch.full((len(requests), H), -7, dtype=torch.int32)
        run(*(pages or self.host()), self.table, int32(requests), index, int32(sinks), *old,
            *self.into, self.fetched, **marks)  # fmt: skip

    def assert_as_packed(self, requests: list[int], index: torch.Tensor, sinks: list[int]) -> None:
        """Compare with what `pack` writes from contiguous pages on the device, bit by bit."""
        expected = self.segment(self.B, self.old[0].dtype)
        self.pack(requests, index, sinks, expected)
        for request in requests:
            for head in range(H):
                count = int(expected[3][request, head])
                assert int(self.into[3][request, head]) == count
                assert torch.equal(self.into[2][request, head], expected[2][request, head])
                for ours, wanted in zip(self.into[:2], expected[:2], strict=True):
                    assert torch.equal(ours[request, head, :count], wanted[request, head, :count])


OLD = [[[5, 9, 20, 40], [6, 7]], [[2, 3, 30], []]]
NEW = [[[3, 9, 20, 41, 49], [6, 8]], [[2, 30], [12, 13, 31]]]


@pytest.mark.parametrize(
    ("D", "E", "dtype", "page_size"),
    [(8, 8, torch.float, 1), (24, 7, torch.float, 16), (64, 80, torch.half, 100), (256, 256, torch.half, 16)],
)
def test_rows_are_those_that_pack_writes_from_either_side(run, D, E, dtype, page_size):
    """A row that is on the device is not read from the host, where it is NaN here."""
    tiers = Tiers([50, 33], D, E, dtype=dtype, page_size=page_size)
    tiers.pack([0, 1], selection(OLD, 6), [2, 2], tiers.old)
    pages = tiers.host()
    for request, (old, new) in enumerate(zip(OLD, NEW, strict=True)):
        for head in range(H):
            tiers.forget(pages, request, head, {0, 1} | (set(old[head]) & set(new[head])))
    tiers.recall(run, [0, 1], selection(NEW, 6), [2, 2], pages)
    tiers.assert_as_packed([0, 1], selection(NEW, 6), [2, 2])
    assert tiers.fetched.tolist() == [[3, 1], [0, 3]]


def test_an_empty_old_segment_gives_nothing_but_its_rows_are_never_read(run):
    """Positions of an earlier request, behind the length, are no positions of this one."""
    tiers = Tiers([50, 33])
    tiers.pack([0, 1], selection(NEW, 6), [2, 2], tiers.old)
    for part in tiers.old[:2]:
        part.fill_(torch.nan)
    tiers.old[3].zero_()
    tiers.recall(run, [0, 1], selection(NEW, 6), [2, 2])
    tiers.assert_as_packed([0, 1], selection(NEW, 6), [2, 2])
    assert tiers.fetched.tolist() == [[7, 4], [4, 5]]


@pytest.mark.parametrize("size", [63, 65, 130])
def test_segments_of_several_tiles_find_every_old_row(run, size):
    """Every old position but each third is wanted again; the search meets lengths around powers of two."""
    tiers = Tiers([600], S=size)
    old = [sorted(torch.randperm(590)[: size - 2 - cut].add(2).tolist()) for cut in (0, 9)]
    spare = sorted(set(range(2, 600)) - set(old[0]) - set(old[1]))
    new = [sorted(set(positions) - set(positions[::3]) | set(spare[: len(positions[::3])])) for positions in old]
    tiers.pack([0], selection([old], size - 2), [2], tiers.old)
    pages = tiers.host()
    for head in range(H):
        tiers.forget(pages, 0, head, {0, 1} | (set(old[head]) & set(new[head])))
    tiers.recall(run, [0], selection([new], size - 2), [2], pages)
    tiers.assert_as_packed([0], selection([new], size - 2), [2])
    assert tiers.fetched.tolist() == [[len(positions[::3]) for positions in old]]


def test_heads_that_are_not_refreshed_keep_their_rows(run):
    tiers = Tiers([50, 33])
    tiers.pack([0, 1], selection(OLD, 6), [2, 2], tiers.old)
    tiers.recall(run, [1, 0], selection([NEW[1], NEW[0]], 6), [2, 2], heads_RH=int32([[1, 0], [0, 1]]))
    assert tiers.fetched.tolist() == [[0, 0], [0, 1]]
    for part, request, head in ((part, *pair) for part in tiers.into[2:] for pair in ((1, 1), (0, 0))):
        assert (part[request, head] == -7).all()
    tiers.pack([1, 0], selection([NEW[1], NEW[0]], 6), [2, 2], expected := tiers.segment(2, torch.float32))
    for request, head in ((1, 0), (0, 1)):
        for ours, wanted in zip(tiers.into, expected, strict=True):
            torch.testing.assert_close(ours[request, head], wanted[request, head], equal_nan=True)


@pytest.mark.parametrize("sink", [0, 3, 14])
def test_sinks_are_recalled_and_cut_off_like_packed_ones(run, sink):
    tiers = Tiers([50, 33])
    tiers.pack([0, 1], selection(OLD, 6), [1, 1], tiers.old)
    tiers.recall(run, [0], selection([[[20, 40], []]], 6), [sink])
    tiers.assert_as_packed([0], selection([[[20, 40], []]], 6), [sink])


def test_a_row_without_a_request_writes_nothing_and_fetches_nothing(run):
    tiers = Tiers([50, 33])
    tiers.pack([0, 1], selection(OLD, 6), [2, 2], tiers.old)
    tiers.recall(run, [-1, 0], selection([NEW[1], NEW[0]], 6), [-1, 2])
    assert tiers.fetched.tolist() == [[0, 0], [3, 1]]
    assert (tiers.into[2][1] == -7).all()
    assert (tiers.into[3][1] == -7).all()
    assert tiers.into[0][1].isnan().all()


def test_tensors_that_do_not_fit_are_named(run):
    tiers = Tiers([50, 33])
    tiers.pack([0, 1], selection(OLD, 6), [2, 2], tiers.old)
    key, value = tiers.host()
    index = selection(NEW, 6)
    for pages, message in (
        ((key.half(), value), "key_pages must have the dtype of key, torch.float32, got torch.float16"),
        ((key, value[:, :1]), r"value_pages must be \[P=8, H=2, N=16, E\], got"),
    ):
        with pytest.raises(ValueError, match=message):
            tiers.recall(run, [0, 1], index, [2, 2], pages)
    with pytest.raises(ValueError, match=r"^heads must be \[R=2, H=2\], got \[1, 2\]$"):
        tiers.recall(run, [0, 1], index, [2, 2], heads_RH=int32([[1, 1]]))
    with pytest.raises(ValueError, match=r"^index must have at most S=12 positions, got 13$"):
        tiers.recall(run, [0, 1], selection(NEW, 13), [2, 2])
