"""The fast step: two segments in one softmax equal dense attention under Eq. 25's mask."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

from sfi_kernels.decode_attention import sparse_attention
from sfi_kernels.pack import pack
from tests.fakes import error_bound, kernel_device, paged, plain_attention

H, G, D = 2, 2, 16
SCALE = 0.3
# by request and KV head, sinks included: ragged, and heads that hold different numbers of tokens
PACKED = [[[0, 1, 5, 30], [0, 1, 2, 3, 4, 40, 41]], [[0, 1, 3], [0, 1]], [[0, 1], [0, 1, *range(50, 90)]]]
LENGTHS, STARTS = [65, 9, 130], [50, 5, 100]


def attended_positions(index_BHS: torch.Tensor, recent_start_B: torch.Tensor, length_B: torch.Tensor) -> torch.Tensor:
    """Return what a fast step reads, [B, H, T] bool: sink, selected and recent tokens; -1 pads the index."""
    B, H, _ = index_BHS.shape
    position = torch.arange(int(length_B.max()), device=index_BHS.device)
    recent_BT = (position >= recent_start_B[:, None]) & (position < length_B[:, None])
    read = recent_BT[:, None].repeat(1, H, 1)
    packed = torch.zeros(B, H, len(position) + 1, dtype=torch.bool, device=index_BHS.device)
    packed.scatter_(2, index_BHS.long() % (len(position) + 1), value=True)  # -1 lands past the end
    return read | packed[:, :, :-1]


@dataclass
class FastStep:
    """A fast step over a small cache, and the dense computation that it must equal."""

    backend: ClassVar[str]
    packed: list[list[list[int]]] = field(default_factory=lambda: PACKED)
    lengths: list[int] = field(default_factory=lambda: LENGTHS)
    starts: list[int] = field(default_factory=lambda: STARTS)
    page_size: int = 16
    width: int = D
    dtype: torch.dtype = torch.float32
    spare: int = 3

    def __post_init__(self) -> None:
        B = len(self.lengths)
        S = max(len(head) for row in self.packed for head in row) + self.spare
        self.query = torch.randn(B, H, G, D).to(self.dtype)
        self.keys = [torch.randn(H, T, D).to(self.dtype) for T in self.lengths]
        self.values = [torch.randn(H, T, self.width).to(self.dtype) for T in self.lengths]
        self.index_BHS = torch.tensor(
            [[head + [-1] * (S - len(head)) for head in row] for row in self.packed], dtype=torch.int32
        )
        self.length_B = torch.tensor(self.lengths, dtype=torch.int32)
        self.start_B = torch.tensor(self.starts, dtype=torch.int32)
        self.key_PHND, self.table_BP = paged(self.keys, self.page_size)
        self.value_PHNE, _ = paged(self.values, self.page_size)

    def segment(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack, and spoil every row that does not count."""
        B = self.index_BHS.shape[0]
        key, value = (
            torch.full((*self.index_BHS.shape, width), torch.nan, dtype=self.dtype) for width in (D, self.width)
        )
        sink, position = torch.zeros(B, dtype=torch.int32), torch.empty_like(self.index_BHS)
        length = torch.empty(B, H, dtype=torch.int32)
        pages, every = (self.key_PHND, self.value_PHNE, self.table_BP), torch.arange(B).int()
        pack.reference(*pages, every, self.index_BHS, sink, key, value, position, length)
        assert torch.equal(position, self.index_BHS)
        return key, value

    def attend(self, rows: slice = slice(None), **options) -> torch.Tensor:
        device = kernel_device(self.backend.partition(" ")[0], self.dtype, self.page_size)
        packed = [part[rows] for part in self.segment()]
        backend, in_place, _ = self.backend.partition(" in place")
        if in_place:  # only the positions count
            options["position_BHS"] = self.index_BHS[rows]
        operands = (
            self.query[rows],
            *packed,
            (self.index_BHS >= 0).sum(2, dtype=torch.int32)[rows],
            self.key_PHND,
            self.value_PHNE,
            self.table_BP[rows],
            self.start_B[rows],
            self.length_B[rows],
        )
        options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
        attend = sparse_attention.on(backend)
        return attend(*(t.to(device) for t in operands), scale=SCALE, **options).cpu()

    def assert_plain(self, **options):
        """Compare with float64 attention under the mask of Eq. 25."""
        out = self.attend(**options)
        assert out.dtype == self.dtype
        mask_BHT = attended_positions(self.index_BHS, self.start_B, self.length_B)
        for row, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            segment = self.query[row : row + 1, :, :, None], key[None], value[None]
            visible = mask_BHT[row : row + 1, :, None, None, : key.shape[1]]
            expected, _ = plain_attention(*segment, SCALE, visible=visible, **options)
            atol, _ = error_bound(*segment, SCALE)
            torch.testing.assert_close(out[row : row + 1].double(), expected[:, :, :, 0], rtol=0, atol=atol)


@pytest.fixture(params=["torch", "triton", "numba", "numba in place"], autouse=True)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("numba"):
        pytest.importorskip("numba")
    FastStep.backend = request.param
    return request.param


@pytest.mark.parametrize(
    ("page_size", "dtype"),
    [(1, torch.float), (16, torch.half), (64, torch.float), (128, torch.bfloat16), (130, torch.half)],
)
def test_two_segments_equal_dense_attention_under_the_mask(page_size: int, dtype: torch.dtype):
    """Eq. 25; the heads of a request hold different numbers of tokens."""
    FastStep(page_size=page_size, dtype=dtype).assert_plain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_hold_equally_many_take_the_unmasked_path(dtype: torch.dtype):
    packed = [[[0, 1, 5], [0, 1, 40]], [[0, 1, 2, 3], [0, 1, 2, 4]], [[0, 99], [1, 98]]]
    FastStep(packed=packed, dtype=dtype).assert_plain()


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"packed": [[[], [0, 1]], [[0], []], [[0, 7], [3]]]},
        {"starts": [0, 0, 0], "spare": 0},
        {"lengths": [1, 64, 65], "starts": [0, 63, 64]},
    ],
    ids=["no head", "not every head", "all is recent, no room", "the query alone is recent"],
)
def test_heads_may_hold_nothing(case):
    FastStep(**({"packed": [[[], []]] * 3} | case)).assert_plain()


def test_a_soft_cap_bends_the_logits_of_both_segments_and_values_may_be_wider():
    FastStep(width=24).assert_plain(soft_cap=0.5)


def test_a_learned_sink_takes_part_in_the_one_softmax():
    sink_HG = torch.tensor([[2.0, -1.0], [0.0, 4.0]])
    FastStep().assert_plain(sink_HG=sink_HG)
    FastStep(packed=[[[], []]] * 3).assert_plain(sink_HG=sink_HG)


@pytest.mark.parametrize(("number", "weighs"), [(-torch.inf, False), (torch.nan, True)])
def test_a_logit_of_minus_infinity_weighs_nothing_and_nan_spoils_the_output(backend: str, number: float, weighs):
    if backend == "triton":
        pytest.skip("rounds the maximum of a tile otherwise")
    step = FastStep(lengths=[70] * 3, starts=[0] * 3, packed=[[[], []]] * 3, page_size=128)
    step.query = step.query.abs()
    plain = step.attend()
    step.key_PHND[step.table_BP[0, 0], 0, :65] = number
    spoiled = step.attend()
    assert spoiled[0, 0].isnan().all() == weighs
    if not weighs:
        rows = slice(0, 1)
        step.start_B[0] = 65
        torch.testing.assert_close(spoiled[rows, :1], step.attend(rows)[:, :1])
    assert torch.equal(spoiled[1:], plain[1:])


@pytest.mark.parametrize(
    ("dtype", "packed"), [(torch.float32, PACKED), (torch.float16, [[[0, 1, 3, 4], [0, 1, 2, 4]]] * 3)]
)
def test_a_request_in_a_batch_computes_what_it_computes_alone(backend: str, packed, dtype):
    """Requests that hold equally many share a call; the kernels may split keys, and round, otherwise."""
    step = FastStep(packed=packed, dtype=dtype)
    together = step.attend()
    for row in range(3):
        alone = step.attend(slice(row, row + 1))
        if backend != "triton":
            assert torch.equal(together[row : row + 1], alone)
        else:
            torch.testing.assert_close(together[row : row + 1], alone)
