"""Packing: one refresh of the packed segments (Reorg), in the reference and in the kernel."""

import pytest
import torch

from sfi_kernels.launch import KernelLimitError
from sfi_kernels.pack import pack, pack_layers
from tests.fakes import int32, paged

H, D, E = 2, 3, 5
UNTOUCHED = -7


@pytest.fixture(params=["torch", "triton"])
def run(request, kernel_device):
    if request.param == "torch":
        return pack.reference
    pytest.importorskip("triton")

    def on_device(*tensors: torch.Tensor, **marks: torch.Tensor) -> None:
        moved = [tensor.to(kernel_device) for tensor in tensors]
        pack.triton(*moved, **{name: mark.to(kernel_device) for name, mark in marks.items()})
        for tensor, result in zip(tensors, moved, strict=True):
            tensor.copy_(result)

    return on_device


class Batch:
    """Requests of given lengths in shuffled pages, and segments filled with what must stay."""

    def __init__(self, lengths: list[int], S: int, page_size=16, D=D, E=E, dtype=torch.float32):
        self.keys = [torch.randn(H, T, D).to(dtype) for T in lengths]
        self.values = [torch.randn(H, T, E).to(dtype) for T in lengths]
        self.key_PHND, self.table_BP = paged(self.keys, page_size)
        self.value_PHNE, _ = paged(self.values, page_size)
        B = len(lengths)
        self.key_BHSD = torch.full((B, H, S, D), float(UNTOUCHED), dtype=dtype)
        self.value_BHSE = torch.full((B, H, S, E), float(UNTOUCHED), dtype=dtype)
        self.position_BHS = torch.full((B, H, S), UNTOUCHED, dtype=torch.int32)
        self.length_BH = torch.full((B, H), UNTOUCHED, dtype=torch.int32)

    def pack(self, run, requests: list[int], index_RHK: torch.Tensor, sinks: list[int], **marks) -> None:
        pages = self.key_PHND, self.value_PHNE, self.table_BP
        run(*pages, int32(requests), index_RHK, int32(sinks), *self.segment, **marks)

    @property
    def segment(self) -> tuple[torch.Tensor, ...]:
        return self.key_BHSD, self.value_BHSE, self.position_BHS, self.length_BH

    def assert_holds(self, request: int, *heads: list[int] | None) -> None:
        """Compare a request's segment with the positions of each head; the other rows are undefined."""
        S = self.key_BHSD.shape[2]
        for head, positions in enumerate(heads):
            if positions is None:
                continue
            count = len(positions)
            assert self.length_BH[request, head] == count
            packed_positions = self.position_BHS[request, head].tolist()
            assert packed_positions == positions + [-1] * (S - count)
            for packed, rows in ((self.key_BHSD, self.keys), (self.value_BHSE, self.values)):
                part = packed[request, head]
                assert torch.equal(part[:count], rows[request][head, positions])

    def assert_untouched(self, request: int) -> None:
        for tensor in self.segment:
            assert (tensor[request] == UNTOUCHED).all()


@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_each_head_gets_its_own_positions_of_its_own_request(run, page_size: int):
    batch = Batch([100, 33], 7, page_size)
    selected = [[[4, 15, 16, 64, 99], [2, 31, 63, 64, 98]], [[2, 3, 5, 15, 32], [5, 6, 7, 16, 31]]]
    batch.pack(run, [0, 1], torch.tensor(selected, dtype=torch.int32), [2, 2])
    for request, heads in enumerate(selected):
        batch.assert_holds(request, *([0, 1, *positions] for positions in heads))


def test_only_the_refreshed_requests_change_whatever_their_order(run):
    batch = Batch([20, 25, 30, 35], 4, 8)
    index = torch.tensor([[[30, 34], [5, 6]], [[7, 8], [24, -1]]], dtype=torch.int32)
    batch.pack(run, [3, 1], index, [2, 0])
    batch.assert_untouched(0)
    batch.assert_untouched(2)
    batch.assert_holds(3, [0, 1, 30, 34], [0, 1, 5, 6])
    batch.assert_holds(1, [7, 8], [24])


def test_rows_of_no_request_change_nothing(run):
    """A CUDA graph has room for more slow requests than there are."""
    batch = Batch([20, 20], 6, 8)
    index = torch.tensor([[[3, 9], [17, -1]], [[5, 6], [7, 8]]], dtype=torch.int32)
    batch.pack(run, [1, -1], index, [1, -1])
    batch.assert_holds(1, [0, 3, 9], [0, 17])
    batch.assert_untouched(0)
    batch.pack(run, [-1], index[1:], [2])
    batch.pack(run, [], index[:0], [])
    batch.assert_untouched(0)


@pytest.mark.parametrize(("count", "sink"), [(63, 0), (64, 0), (62, 3), (65, 0), (128, 3)])
def test_lengths_around_the_border_of_a_tile(run, count: int, sink: int):
    """The kernel packs 64 rows a program; one of them alone knows the length."""
    batch = Batch([200], sink + 150)
    chosen = [sorted(torch.randperm(190)[:n].add(sink).tolist()) for n in (count, count - 5)]
    padded = [positions + [-1] * (150 - len(positions)) for positions in chosen]
    batch.pack(run, [0], torch.tensor([padded], dtype=torch.int32), [sink])
    batch.assert_holds(0, *([*range(sink), *positions] for positions in chosen))


def test_sinks_beyond_a_tile(run):
    batch = Batch([200], 80)
    batch.pack(run, [0], torch.tensor([[[150], [-1]]], dtype=torch.int32), [70])
    batch.assert_holds(0, [*range(70), 150], [*range(70)])


@pytest.mark.parametrize(("K", "sink"), [(0, 2), (3, 0), (3, 2)])
def test_without_a_selection_only_the_sinks_are_packed(run, K: int, sink: int):
    batch = Batch([20, 20], 6, 8)
    batch.pack(run, [1], torch.full((1, H, K), -1, dtype=torch.int32), [sink])
    batch.assert_holds(1, [*range(sink)], [*range(sink)])


def test_a_segment_without_rows_gets_its_length(run):
    batch = Batch([20], 0)
    batch.pack(run, [0], torch.empty(1, H, 0, dtype=torch.int32), [0])
    batch.assert_holds(0, [], [])


@pytest.mark.parametrize(
    ("D", "E", "dtype"), [(80, 96, torch.float16), (1, 7, torch.float32), (256, 256, torch.float16)]
)
def test_rows_of_any_width_are_copied_bit_by_bit(run, D: int, E: int, dtype: torch.dtype):
    batch = Batch([100], 12, 64, D, E, dtype)
    batch.pack(run, [0], torch.arange(60, 70, dtype=torch.int32).expand(1, H, 10).clone(), [2])
    batch.assert_holds(0, [0, 1, *range(60, 70)], [0, 1, *range(60, 70)])


def test_what_does_not_fit_is_cut_off_and_spares_the_next_request(run):
    """Only the device knows the sinks, so that no one can refuse."""
    batch = Batch([20, 20, 20], 4, 8)
    index = torch.tensor([[[6, 7, 8], [9, -1, -1]]] * 2, dtype=torch.int32)
    batch.pack(run, [0, 1], index, [2, 5])
    batch.assert_holds(0, [0, 1, 6, 7], [0, 1, 9])
    batch.assert_holds(1, [0, 1, 2, 3], [0, 1, 2, 3])
    batch.assert_untouched(2)


def test_tensors_that_do_not_fit_are_named(run):
    batch = Batch([20], 4)
    index = torch.zeros(1, H, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^index must have at most S=4 positions, got 5$"):
        batch.pack(run, [0], torch.zeros(1, H, 5, dtype=torch.int32), [0])
    with pytest.raises(ValueError, match=r"^heads must be \[R=1, H=2\], got \[2, 2\]$"):
        batch.pack(run, [0], index, [1], heads_RH=torch.ones(2, 2).int())
    with pytest.raises(ValueError, match=r"^sink must be \[R=1\], got \[2\]$"):
        batch.pack(run, [0], index, [0, 0])
    with pytest.raises(ValueError, match=r"^index must be int32, got torch.int64$"):
        batch.pack(run, [0], index.long(), [0])
    batch.key_BHSD = batch.key_BHSD.double()
    with pytest.raises(ValueError, match=r"^key_pages must have the dtype of key, torch.float64"):
        batch.pack(run, [0], index, [0])


def test_rows_too_wide_for_the_kernel_are_refused():
    pytest.importorskip("triton")
    batch = Batch([20], 4, D=257)
    with pytest.raises(KernelLimitError, match=r"^key and value must be at most 256 wide"):
        batch.pack(pack.triton, [0], torch.zeros(1, H, 2, dtype=torch.int32), [0])


def test_heads_that_are_not_refreshed_stay_as_they_are(run):
    batch = Batch([20, 20], 6, 8)
    index = torch.tensor([[[3, 9], [17, -1]], [[5, 6], [7, 8]]], dtype=torch.int32)
    batch.pack(run, [1, 0], index, [1, 2], heads_RH=torch.tensor([[0, 1], [1, 0]]).int())
    for tensor in batch.segment:
        assert (tensor[1, 0] == UNTOUCHED).all()
        assert (tensor[0, 1] == UNTOUCHED).all()
    batch.assert_holds(1, None, [0, 17])
    batch.assert_holds(0, [0, 1, 5, 6])


def test_layers_packed_together_hold_what_each_alone_holds():
    layers = [Batch([40, 23, 31], S=9, D=D + layer) for layer in range(3)]
    for layer in layers[1:]:  # the pages of a run's layers have one table
        for pages, rows in ((layer.key_PHND, layer.keys), (layer.value_PHNE, layer.values)):
            for request, request_rows in enumerate(rows):
                for slot, page in enumerate(layers[0].table_BP[request].tolist()):
                    part = request_rows[:, slot * 16 : (slot + 1) * 16]
                    pages[page, :, : part.shape[1]] = part
    index_LHK = torch.tensor(
        [[[3, 8, 22], [5, -1, -1]], [[4, 5, -1], [7, 20, 21]], [[2, 3, 4], [6, 19, -1]]], dtype=torch.int32
    )
    segments = [(layer.key_PHND, layer.value_PHNE, *layer.segment) for layer in layers]
    pack_layers(segments, layers[0].table_BP, 1, index_LHK, int32([2]))
    for layer, index_HK in zip(layers, index_LHK.tolist(), strict=True):
        layer.assert_holds(1, *([0, 1, *(j for j in index_K if j >= 0)] for index_K in index_HK))
        layer.assert_untouched(0)
        layer.assert_untouched(2)
    with pytest.raises(ValueError, match="index must have at most S=9 positions, got 10"):
        pack_layers(segments, layers[0].table_BP, 1, int32([*range(60)]).view(3, 2, 10), int32([2]))
