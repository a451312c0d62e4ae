"""A decoding step's attention: fast, slow and idle requests in one launch, against float64."""

from dataclasses import dataclass

import pytest
import torch

from sfi_kernels.decode_attention import DecodeAttention, decode_attention, resident_programs, split_plan, work_items
from sfi_kernels.launch import KernelLimitError
from sfi_kernels.pages import HeadPages, Ring
from sfi_kernels.step_descriptor import FAST, IDLE, SLOW, SPLITS, StepDescriptor, StepRequest, describe_step
from tests.covering import first
from tests.fakes import error_bound, kernel_device, paged, plain_attention

H, SINK, SCALE = 2, 2, 0.3
# lengths that fill a tile, miss it by one, and need several splits
LENGTHS = [260, 65, 64, 63, 130, 1, 200]
MODES = [SLOW, FAST, SLOW, FAST, IDLE, SLOW, FAST]


@dataclass
class Step:
    """A step over random pages; the packed segments hold rows of their own, so that a mix-up shows."""

    backend: str
    lengths: list[int]
    modes: list[int]
    G: int = 2
    D: int = 16
    E: int = 16
    page_size: int = 64
    dtype: torch.dtype = torch.float32
    recent: int = 20
    places: int | None = None
    dense: list[list[int]] | None = None  # by request and head, for the mixed requests
    mixed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        B = len(self.lengths)
        self.starts = [max(min(SINK, T), T - self.recent) for T in self.lengths]
        self.query = torch.randn(B, H, self.G, self.D).to(self.dtype)
        self.keys = [torch.randn(H, T, self.D).to(self.dtype) for T in self.lengths]
        self.values = [torch.randn(H, T, self.E).to(self.dtype) for T in self.lengths]
        self.key_PHND, self.table_BP = paged(self.keys, self.page_size, spare_pages=1)
        self.value_PHNE, _ = paged(self.values, self.page_size, spare_pages=1)
        # heads hold different numbers of packed rows, up to more than a tile
        self.packed_length = torch.tensor([[min(T, 7), min(T, 70)] for T in self.lengths]).int()
        self.packed = [torch.full((B, H, 73, n), torch.nan, dtype=self.dtype) for n in (self.D, self.E)]
        for row, head in ((b, h) for b in range(B) for h in range(H)):
            for part in self.packed:
                rows = part[row, head, : self.packed_length[row, head]]
                rows.copy_(torch.randn(rows.shape))
        self.device = torch.device(kernel_device(self.backend, self.dtype, self.page_size))

    def descriptor(self) -> StepDescriptor:
        places = self.places or resident_programs(self.device)
        requests = [
            StepRequest(mode=mode, length=T, recent_start=start, packed=70, sink=min(SINK, T), mixed=row in self.mixed)
            for row, (mode, T, start) in enumerate(zip(self.modes, self.lengths, self.starts, strict=True))
        ]
        step = describe_step(requests, work_items(len(self.lengths), H, places), self.device)
        split_plan.on(self.backend)(step, H, places)
        return step

    def operands(self) -> dict:
        tensors = {
            "query_BHGWD": self.query[:, :, :, None], "packed_key_BHSD": self.packed[0],
            "packed_value_BHSE": self.packed[1], "packed_length_BH": self.packed_length, "key_PHND": self.key_PHND,
            "value_PHNE": self.value_PHNE, "block_table_BP": self.table_BP,
        }  # fmt: skip
        if self.dense is not None:
            tensors["dense_BH"] = torch.tensor(self.dense).int()
        return {n: t.to(self.device) for n, t in tensors.items()}

    def attend(self, **options) -> DecodeAttention:
        options = {k: v.to(self.device) if torch.is_tensor(v) else v for k, v in options.items()}
        run = decode_attention.on(self.backend)
        result = run(**self.operands(), descriptor=self.descriptor(), scale=SCALE, **options)
        return DecodeAttention(*(part if part is None else part.cpu() for part in result))

    def is_dense(self, row: int, head: int) -> bool:
        if row in self.mixed:
            return self.dense[row][head] == 1
        return self.modes[row] == SLOW

    def visible_rows(self, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that a request's head attends to, [1, 1, T, ...]."""
        key, value = self.keys[row][head], self.values[row][head]
        if not self.is_dense(row, head):
            count = self.packed_length[row, head]
            recent = slice(self.starts[row], None)
            key = torch.cat([self.packed[0][row, head, :count], key[recent]])
            value = torch.cat([self.packed[1][row, head, :count], value[recent]])
        return key[None, None], value[None, None]

    def assert_plain(self, sink_HG: torch.Tensor | None = None, **options) -> None:
        """Compare every request and head with float64 attention over what it may read."""
        extra = {} if sink_HG is None else {"sink_HG": sink_HG}
        out = self.attend(**options, **extra).out_BHGWE[:, :, :, 0]
        assert out.dtype == self.dtype
        for row, mode in enumerate(self.modes):
            if mode == IDLE:
                assert (out[row] == 0).all()
                continue
            for head in range(H):
                query = self.query[row, head][None, None, :, None]
                segment = query, *self.visible_rows(row, head)
                sink = {} if sink_HG is None else {"sink_HG": sink_HG[head : head + 1]}
                expected, _ = plain_attention(*segment, SCALE, **options, **sink)
                atol, _ = error_bound(*segment, SCALE)
                ours = out[row, head].double()
                torch.testing.assert_close(ours, expected[0, 0, :, 0], rtol=0, atol=atol)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fast_slow_and_idle_requests_share_a_step(backend: str, dtype: torch.dtype):
    Step(backend, LENGTHS, MODES, dtype=dtype).assert_plain()


@pytest.mark.parametrize(("G", "D", "E"), [(1, 16, 16), (3, 24, 40), (16, 8, 8), (5, 96, 96)])
def test_heads_and_groups_of_any_size_up_to_the_limits(backend: str, G: int, D: int, E: int):
    Step(backend, [65, 130], [FAST, SLOW], G=G, D=D, E=E).assert_plain()


@pytest.mark.parametrize("page_size", [16, 128])
def test_a_page_holds_one_tile_or_several(backend: str, page_size: int):
    Step(backend, [65, 200], [FAST, SLOW], page_size=page_size).assert_plain()


@pytest.mark.parametrize("places", [2, 8, 64])
def test_the_plan_does_not_change_the_result(backend: str, places: int):
    """One split a request, a few, and as many as there are; a learned sink takes its weight once."""
    step = Step(backend, [500, 300, 65], [SLOW, FAST, SLOW], places=places)
    splits = step.descriptor().table_BX[:, SPLITS].tolist()
    assert (max(splits) == 1) == (places == 2)
    step.assert_plain(sink_HG=torch.tensor([[2.0, -1.0], [0.0, 4.0]]))


def test_a_program_of_the_join_may_hold_fewer_parts_than_a_request_has(monkeypatch):
    """Parts of -inf among them: a slow request whose candidates all lie in one split."""
    kernels = pytest.importorskip("sfi_kernels.decode_attention.triton")
    step = Step("triton", [1000, 300], [SLOW, FAST], places=64, recent=900)
    assert step.descriptor().table_BX[0, SPLITS] > 6
    whole = step.attend(evidence=True)
    monkeypatch.setattr(kernels, "JOINED", 2)
    step.assert_plain()
    in_tiles = step.attend(evidence=True)
    torch.testing.assert_close(in_tiles.log_sum_BHGW, whole.log_sum_BHGW)


def test_a_soft_cap_bends_every_logit(backend: str):
    Step(backend, [65, 130], [FAST, SLOW]).assert_plain(soft_cap=0.5)


def test_a_request_with_an_empty_candidate_set_has_no_sum(backend: str):
    result = Step(backend, [15, 64], [SLOW, SLOW]).attend(evidence=True)
    assert (result.log_sum_BHGW[0] == -torch.inf).all()
    assert result.log_sum_BHGW[1].isfinite().all()


@pytest.mark.parametrize("modes", [[FAST, FAST], [FAST, IDLE]])
def test_without_a_slow_request_there_is_no_evidence(backend: str, modes: list[int]):
    result = Step(backend, [65, 30], modes).attend(evidence=True)
    assert result.logits_BHGWT is None
    assert result.log_sum_BHGW is None


def test_logits_of_every_size_come_out_right(backend: str):
    """Softmaxes that underflow and overflow where the running peak is forgotten."""
    step = Step(backend, [130, 130], [FAST, SLOW])
    step.query *= 100
    step.assert_plain()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("packed_key_BHSD", lambda t: t[:, :, :, :8], r"packed_key must be \[Z, H=2, S, D=16\]"),
        ("packed_value_BHSE", lambda t: t[:, :, :3], "packed_value must be"),
        ("packed_length_BH", lambda t: t.long(), "packed_length must be int32, got torch.int64"),
        ("key_PHND", lambda t: t.half(), "key must have the dtype of query, .*32, got .*16"),
        ("value_PHNE", lambda t: t.mT, "value must be"),
        ("block_table_BP", lambda t: t[:1], r"block_table must be \[B=2, P\]"),
        ("query_BHGWD", lambda t: t[:1], r"query must be \[B=2, H, G, W, D\]"),
    ],
)
def test_an_operand_that_does_not_fit_is_named(backend: str, name: str, change, message: str):
    step = Step(backend, [65, 130], [FAST, SLOW])
    operands = step.operands()
    operands[name] = change(operands[name])
    with pytest.raises(ValueError, match=message):
        decode_attention.on(backend)(**operands, descriptor=step.descriptor(), scale=SCALE)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"D": 257, "E": 16}, "head dimension must be at most 256 .*, got 257; use the torch backend"),
        ({"E": 300}, "head dimension must be at most 256 .*, got 300; use the torch backend"),
        ({"page_size": 40}, "page size must be a multiple of 16 .*, got 40; use the torch backend"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_with_the_limit(shape: dict[str, int], message: str):
    step = Step("torch", [65], [FAST], **shape)
    with pytest.raises(KernelLimitError, match=message):
        decode_attention.triton(**step.operands(), descriptor=step.descriptor(), scale=SCALE)


def ring_of(step: Step, homes: tuple[int, ...]) -> Ring:
    """Move the recent tokens to a ring, and all of the heads in `homes`; leave NaN where a step must not read."""
    N, (B, pages) = step.page_size, step.table_BP.shape
    size = step.recent // N + 2
    table_BP = (torch.arange(B)[:, None] * size + torch.arange(pages) % size).int()
    near, home_pages = [], []
    for whole, tokens in ((step.key_PHND, step.keys), (step.value_PHNE, step.values)):
        ring = torch.full((B * size, *whole.shape[1:]), torch.nan, dtype=whole.dtype)
        home = torch.full((len(whole), len(homes), *whole.shape[2:]), torch.nan, dtype=whole.dtype)
        for row, head in ((b, h) for b in range(B) for h in range(H)):
            used = step.table_BP[row, : -(-step.lengths[row] // N)].long()
            for position in range(step.starts[row], step.lengths[row]) if not step.is_dense(row, head) else ():
                ring[table_BP[row, position // N], head, position % N] = tokens[row][head, position]
            if head in homes:
                home[used, homes.index(head)] = whole[used, head]
            if head in homes or not step.is_dense(row, head):
                whole[used, head] = torch.nan
        near.append(ring.to(step.device))
        home_pages.append(home.to(step.device))
    place_H = torch.tensor([homes.index(head) if head in homes else -1 for head in range(H)]).int()
    heads = HeadPages(place_H.to(step.device), *home_pages) if homes else None
    return Ring(*near, table_BP.to(step.device), heads)


@pytest.mark.parametrize(("dense", "homes"), first([(None, ()), ([[0, 1]] * 7, (1,)), ([[1, 0]] * 7, ())], 2))
def test_a_ring_has_the_recent_tokens_and_dense_reads_go_to_the_pages(backend: str, dense, homes: tuple[int, ...]):
    """To those of heads that are kept on the device first, of which the reference knows nothing; evidence included."""
    torch.manual_seed(0)
    mixed = () if dense is None else (0, 1, 2, 6)
    step = Step(backend, LENGTHS, MODES, E=24, page_size=16, dense=dense, mixed=mixed)
    expected, ring = step.attend(evidence=True), ring_of(step, homes if backend == "triton" else ())
    result = step.attend(evidence=True, ring=ring)
    assert torch.equal(result.out_BHGWE, expected.out_BHGWE)
    assert torch.equal(result.log_sum_BHGW, expected.log_sum_BHGW)
    for row, length in enumerate(length for mode, length in zip(MODES, LENGTHS, strict=True) if mode == SLOW):
        assert torch.equal(result.logits_BHGWT[row, ..., :length], expected.logits_BHGWT[row, ..., :length])
