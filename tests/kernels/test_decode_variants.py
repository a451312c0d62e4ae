"""A step's attention with mixed requests, pseudo tokens, or several queries each to verify a draft."""

from dataclasses import dataclass, field, replace
from itertools import product

import pytest
import torch

from sfi_kernels import step_descriptor as fields
from sfi_kernels.attention_tile import EACH, LAST, SEVERAL, parts_of_pass, tile_shape
from sfi_kernels.decode_attention import DecodeAttention, decode_attention, sparse_attention, split_plan, work_items
from sfi_kernels.launch import Target
from sfi_kernels.partial_attention import PseudoToken
from tests.covering import first
from tests.fakes import causal_mask, error_bound, plain_attention
from tests.kernels.test_decode_attention import SCALE, SINK, H, Step

# mixed and not, in one launch: of 130 tokens a head reads 70 packed rows and four units, one more than the
# dense read has; of 1000 a sparse head has fewer units than work items
LENGTHS = [1000, 130, 150, 65, 130, 3, 64, 200]
MODES = [fields.FAST, fields.FAST, fields.SLOW, fields.SLOW, fields.IDLE, fields.FAST, fields.FAST, fields.SLOW]
DENSE = [[1, 0], [0, 0], [0, 1], [0, 0], [1, 0], [0, 1], [1, 1], [1, 0]]
MIXED_ROWS = (0, 1, 2, 4, 5, 7)
FEW, FEW_MODES = [200, 65, 130, 64], [fields.SLOW, fields.FAST, fields.IDLE, fields.FAST]
SINK_HG = torch.tensor([[2.0, -1.0], [0.0, 4.0]])


def step_of(backend: str, **changes) -> Step:
    options = {"dense": DENSE, "mixed": MIXED_ROWS, "places": 64, **changes}
    return Step(backend, options.pop("lengths", LENGTHS), options.pop("modes", MODES), **options)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_head_of_a_mixed_request_reads_what_its_mark_says(backend: str, dtype: torch.dtype):
    """Requests that are not mixed read as their mode says, whatever their marks."""
    step_of(backend, dtype=dtype).assert_plain()


@pytest.mark.parametrize("places", [2, 400])
def test_the_plan_does_not_change_the_result(backend: str, places: int):
    step = step_of(backend, lengths=[1000, 130], modes=[fields.FAST, fields.SLOW], dense=[[0, 1], [1, 0]],
                   mixed=(0, 1), places=places)  # fmt: skip
    splits = step.descriptor().table_BX[:, fields.SPLITS].tolist()
    assert (max(splits) == 1) == (places == 2)
    step.assert_plain()


@pytest.mark.parametrize(("page_size", "recent"), [(16, 1), (64, 64), (128, 199)])
def test_a_sparse_head_s_recent_segment_begins_anywhere_in_pages_of_any_size(backend: str, page_size: int, recent: int):
    """A learned sink and a soft cap hold for both kinds of heads."""
    two = {"lengths": [200, 130], "modes": [fields.FAST, fields.SLOW], "dense": [[0, 1], [1, 0]], "mixed": (0, 1)}
    step = step_of(backend, page_size=page_size, recent=recent, **two)
    step.assert_plain(sink_HG=SINK_HG, soft_cap=0.5)


def test_dense_heads_of_slow_requests_hand_out_their_logits(backend: str):
    """Eq. 4 and the sum over J; what sparse heads hand out is -inf, which the Selector can tell."""
    step = step_of(backend)
    into = torch.full((MODES.count(fields.SLOW) * H * 2 * (max(LENGTHS) + 1),), torch.inf)
    result = step.attend(evidence=True, into=into)
    slow = [row for row, mode in enumerate(MODES) if mode == fields.SLOW]
    for place, row in enumerate(slow):
        for head in range(H):
            log_sum = result.log_sum_BHGW[place, head, :, 0]
            if not step.is_dense(row, head):
                assert (log_sum == -torch.inf).all()
                assert (result.logits_BHGWT[place, head] == -torch.inf).all()
                continue
            query = step.query[row, head][None, None, :, None]
            key, value = step.visible_rows(row, head)
            expected = (step.query[row, head].double() @ key[0, 0].double().mT) * SCALE
            _, bound = error_bound(query, key, value, SCALE)
            logits = result.logits_BHGWT[place, head, :, 0, : LENGTHS[row]].double()
            torch.testing.assert_close(logits, expected, rtol=0, atol=bound)
            in_J = expected[:, SINK : step.starts[row]].logsumexp(-1)
            torch.testing.assert_close(log_sum.double(), in_J, rtol=0, atol=bound)
    assert torch.equal(result.out_BHGWE, step.attend().out_BHGWE)


@pytest.mark.parametrize("backend", ["torch", "triton", "numba"])
def test_rows_find_their_packed_segments_by_slot(backend: str):
    """As under vLLM: fewer slots than rows, a slow row without one, queries that are parts of wider rows."""
    modes = [fields.FAST, fields.SLOW, fields.FAST, fields.SLOW]
    step_backend = "torch" if backend == "numba" else backend  # whose test steps have a plan
    step = Step(step_backend, [260, 130, 65, 200], modes, places=8)
    common = {"packed": 70, "sink": SINK}
    wanted = step.attend(evidence=True)
    slots, rows = [2, -1, 1, 0], torch.tensor([3, 2, 0])  # by row, and by slot; the slow row 1 has none
    descriptor = fields.describe_step(
        [
            fields.StepRequest(mode=mode, length=T, recent_start=start, slot=slot, wanted=row != 1, **common)
            for row, (mode, T, start, slot) in enumerate(zip(modes, step.lengths, step.starts, slots, strict=True))
        ],
        work_items(4, H, 8), step.device,
    )  # fmt: skip
    assert (descriptor.slow, descriptor.fast) == ((3,), (0, 2))
    split_plan.on(step_backend)(descriptor, H, 8)
    operands = step.operands()
    for name in ("packed_key_BHSD", "packed_value_BHSE", "packed_length_BH"):
        operands[name] = operands[name][rows.to(step.device)].contiguous()
    query = operands["query_BHGWD"]
    wide = query.new_full((4, H * 2 + 3, query.shape[4]), torch.nan)
    wide[:, : H * 2] = query.flatten(1, 3)
    operands["query_BHGWD"] = wide[:, : H * 2].view(4, H, 2, 1, -1)
    out = torch.full_like(query, torch.nan).contiguous()
    result = decode_attention.on(backend)(**operands, descriptor=descriptor, scale=SCALE, evidence=True, out=out)
    assert result.out_BHGWE is out
    torch.testing.assert_close(out.cpu(), wanted.out_BHGWE)
    torch.testing.assert_close(result.logits_BHGWT.cpu()[..., :200], wanted.logits_BHGWT[1:, ..., :200])
    if backend != "numba":
        torch.testing.assert_close(result.log_sum_BHGW.cpu(), wanted.log_sum_BHGW[1:])


def test_marks_and_mixed_requests_come_together(backend: str):
    step = step_of(backend)
    operands, descriptor = step.operands(), step.descriptor()
    dense_BH = operands.pop("dense_BH")

    def run(descriptor, **marks):
        return decode_attention.on(backend)(**operands, **marks, descriptor=descriptor, scale=SCALE)

    with pytest.raises(ValueError, match=r"^dense must be given for mixed requests, got rows \(0, "):
        run(descriptor)
    with pytest.raises(ValueError, match=r"^dense must be int32, got torch.int64$"):
        run(descriptor, dense_BH=dense_BH.long())
    with pytest.raises(ValueError, match=r"^dense must be \[B=8, H=2\], got \[8, 1\]$"):
        run(descriptor, dense_BH=dense_BH[:, :1])
    step.mixed = ()
    with pytest.raises(ValueError, match=r"^dense must be None without mixed requests, got a tensor"):
        run(step.descriptor(), dense_BH=dense_BH)


def test_a_mixed_request_has_the_words_of_a_dense_read():
    """Only a request that decodes can be mixed; the sparse heads find their pages by MIXED."""
    numbers = {"length": 130, "recent_start": 101, "packed": 36, "sink": 4}
    modes = (fields.FAST, fields.SLOW, fields.IDLE, fields.PROMPT)
    requests = [fields.StepRequest(mode=mode, **numbers, mixed=True) for mode in modes]
    requests.append(fields.StepRequest(mode=fields.FAST, **numbers))
    requests.append(fields.StepRequest(mode=fields.SLOW, **numbers, mixed=True, sparse_start=40))
    step = fields.describe_step(requests, 3, torch.device("cpu"))
    words = step.table_BX[:, [fields.MIXED, fields.START, fields.PACKED, fields.ALLOWED_STOP]].tolist()
    assert words[:2] == [[102, 0, 0, 101]] * 2
    assert words[2:5] == [[0, 101, 36, 101]] * 3
    assert words[5] == [41, 0, 0, 101]
    assert (step.mixed, step.slow, step.fast) == ((0, 1, 5), (1, 5), (0, 4))


def pseudo_of(step: Step) -> PseudoToken:
    """Draw one for the fast requests; it weighs as much as some of their keys. The others' value is NaN."""
    fast_B = torch.tensor([mode == fields.FAST for mode in step.modes])
    logit = torch.randn(len(step.modes), H, step.G) * 2
    value, none = torch.randn(len(step.modes), H, step.E), ~fast_B[:, None, None]
    return PseudoToken(logit.masked_fill(none, -torch.inf), value.masked_fill(none, torch.nan))


def attend(step: Step, pseudo: PseudoToken | None, **options) -> torch.Tensor:
    if pseudo is not None:
        options["pseudo"] = PseudoToken(*(part.to(step.device) for part in pseudo))
    return step.attend(**options).out_BHGWE[:, :, :, 0]


def plain(
    step: Step,
    pseudo: PseudoToken,
    row: int,
    head: int,
    soft_cap: float | None = None,
    sink_HG: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax over the keys, the pseudo token and the sink, which has no value; of a request's head."""
    (key,), (value,) = (part[0].double() for part in step.visible_rows(row, head))
    logits = step.query[row, head].double() @ key.mT * SCALE
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    terms = [logits, pseudo.logit_BHG[row, head].double()[:, None]]
    values = [value, pseudo.value_BHE[row, head].double().nan_to_num()[None]]
    if sink_HG is not None:
        terms.append(sink_HG[head].double()[:, None])
        values.append(torch.zeros_like(values[1]))
    return torch.cat(terms, 1).softmax(1) @ torch.cat(values)


def assert_plain(step: Step, **options) -> None:
    pseudo = pseudo_of(step)
    out = attend(step, pseudo, **options)
    assert out.dtype == step.dtype
    for row, mode in enumerate(step.modes):
        if mode == fields.IDLE:
            assert (out[row] == 0).all()
            continue
        for head in range(H):
            segment = step.query[row, head][None, None, :, None], *step.visible_rows(row, head)
            atol, _ = error_bound(*segment, SCALE)
            largest = float(pseudo.value_BHE.nan_to_num().abs().max() / segment[2].abs().max())
            expected = plain(step, pseudo, row, head, **options)
            ours = out[row, head].double()
            torch.testing.assert_close(ours, expected, rtol=0, atol=atol * max(1, largest))


@pytest.mark.parametrize(("places", "options"), [(2, {}), (64, {"sink_HG": SINK_HG}), (64, {"soft_cap": 0.5})])
def test_it_takes_its_share_once_however_often_the_keys_are_split(backend: str, places: int, options: dict):
    """Beside slow requests, which have none, and an idle one."""
    step = Step(backend, FEW, FEW_MODES, places=places)
    splits = step.descriptor().table_BX[:, fields.SPLITS].tolist()
    assert (max(splits) == 1) == (places == 2)
    assert_plain(step, **options)


@pytest.mark.parametrize(("G", "E"), [(1, 16), (3, 40)])
def test_each_query_head_has_its_own_logit_and_each_kv_head_its_own_value(backend: str, G: int, E: int):
    assert_plain(Step(backend, [65, 130], [fields.FAST, fields.SLOW], G=G, E=E))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_meets_keys_of_half_precision(backend: str, dtype: torch.dtype):
    assert_plain(Step(backend, [130, 65], [fields.FAST, fields.FAST], dtype=dtype))


@pytest.mark.parametrize(("places", "options"), [(2, {}), (64, {"sink_HG": SINK_HG})])
def test_a_logit_of_minus_infinity_changes_nothing(backend: str, places: int, options: dict):
    """Bit for bit in the kernels; the reference joins three parts in other steps than two."""
    step = Step(backend, FEW, FEW_MODES, places=places)
    pseudo = pseudo_of(step)
    none = pseudo._replace(logit_BHG=torch.full_like(pseudo.logit_BHG, -torch.inf))
    with_none, without = attend(step, none, **options), attend(step, None, **options)
    if backend == "triton":
        assert torch.equal(with_none.view(torch.int32), without.view(torch.int32))
    else:
        torch.testing.assert_close(with_none, without)


def test_one_that_outweighs_every_key_is_the_output(backend: str):
    """Neither its exponential nor that of keys far below it may leave the range of float32."""
    step = Step(backend, [300, 65], [fields.FAST, fields.FAST], places=64)
    pseudo = pseudo_of(step)
    pseudo = pseudo._replace(logit_BHG=torch.full_like(pseudo.logit_BHG, 1e4))
    expected = pseudo.value_BHE[:, :, None].expand(2, H, 2, -1)
    torch.testing.assert_close(attend(step, pseudo), expected, rtol=0, atol=1e-6)


def test_the_evidence_of_slow_requests_does_not_see_it(backend: str):
    step = Step(backend, [300, 65], [fields.SLOW, fields.FAST])
    pseudo = PseudoToken(*(part.to(step.device) for part in pseudo_of(step)))
    with_pseudo, without = step.attend(evidence=True, pseudo=pseudo), step.attend(evidence=True)
    assert torch.equal(with_pseudo.logits_BHGWT, without.logits_BHGWT)
    assert torch.equal(with_pseudo.log_sum_BHGW, without.log_sum_BHGW)


def test_the_fast_step_alone_takes_it_as_well(backend: str):
    step = Step(backend, [65, 300], [fields.FAST, fields.FAST])
    operands, pseudo = step.operands(), pseudo_of(step)
    numbers = [torch.tensor(x).int().to(step.device) for x in (step.starts, step.lengths)]
    query_BHGD = operands.pop("query_BHGWD")[:, :, :, 0]
    moved = PseudoToken(*(part.to(step.device) for part in pseudo))
    run = sparse_attention.on(backend)
    out = run(query_BHGD, *operands.values(), *numbers, scale=SCALE, pseudo=moved)
    torch.testing.assert_close(out.cpu(), attend(step, pseudo))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("logit_BHG", lambda x: x[:, :1], r"^pseudo logit must be \[B=2, H=2, G=2\], got \[2, 1, 2\]$"),
        ("value_BHE", lambda x: x[..., :3], r"^pseudo value must be \[B=2, H=2, E=16\], got \[2, 2, 3\]$"),
    ],
)
def test_one_that_does_not_fit_is_named(backend: str, name: str, change, message: str):
    step = Step(backend, [65, 130], [fields.FAST, fields.SLOW])
    pseudo = pseudo_of(step)
    with pytest.raises(ValueError, match=message):
        attend(step, pseudo._replace(**{name: change(getattr(pseudo, name))}))


def test_a_step_with_mixed_requests_has_none(backend: str):
    step = Step(backend, [65, 130], [fields.FAST, fields.SLOW], dense=[[1, 0], [0, 1]], mixed=(0, 1))
    with pytest.raises(ValueError, match=r"^pseudo must be None in a step with mixed requests"):
        decode_attention.on(backend)(
            **step.operands(), descriptor=step.descriptor(), scale=SCALE, pseudo=pseudo_of(step)
        )


# a unit of 64 tokens filled, missed by one and passed by one; requests no longer than their queries
DRAFTED = [150, 64, 65, 63, 17, 4, 260, 130, 30]
DRAFT_MODES = [
    fields.SLOW,
    fields.FAST,
    fields.SLOW,
    fields.SLOW,
    fields.SLOW,
    fields.SLOW,
    fields.SLOW,
    fields.IDLE,
    fields.FAST,
]
COUNTS = [5, 1, 17, 2, 17, 4, 1, 0, 1]


@dataclass
class Verification(Step):
    """A step whose slow requests have several queries; padding holds NaN, so that reading it shows."""

    counts: list[int] = field(default_factory=lambda: COUNTS)
    W: int = 17

    def __post_init__(self) -> None:
        super().__post_init__()
        B, W = len(self.lengths), self.W
        self.query = torch.randn(B, H, self.G, W, self.D).to(self.dtype)
        for row, count in enumerate(self.counts):
            self.query[row, :, :, : W - count] = torch.nan

    def descriptor(self) -> fields.StepDescriptor:
        requests = [
            fields.StepRequest(mode=mode, length=T, recent_start=start, packed=70, sink=min(SINK, T), count=count)
            for mode, T, start, count in zip(self.modes, self.lengths, self.starts, self.counts, strict=True)
        ]
        places = self.places or 8
        step = fields.describe_step(requests, work_items(len(requests), H, places), self.device)
        split_plan.on(self.backend)(step, H, places)
        return step

    def operands(self) -> dict:
        return super().operands() | {"query_BHGWD": self.query.to(self.device)}

    def assert_plain(
        self, sink_HG: torch.Tensor | None = None, soft_cap: float | None = None, *, into: torch.Tensor | None = None
    ) -> DecodeAttention:
        """Compare every query with float64 attention over the tokens up to its own, and the evidence."""
        options = {"sink_HG": sink_HG, "soft_cap": soft_cap, "into": into}
        result = self.attend(evidence=True, **options)
        out = result.out_BHGWE
        assert out.shape == (*self.query.shape[:4], self.E)
        for row, count in enumerate(self.counts):
            first = self.W - count
            assert (out[row, :, :, :first] == 0).all()
            for head in range(H if count else 0):
                segment = self.query[row, head, :, first:][None, None], *self.visible_rows(row, head)
                visible = causal_mask(count, segment[1].shape[2])
                sink = None if sink_HG is None else sink_HG[head : head + 1]
                expected, _ = plain_attention(*segment, SCALE, visible=visible, soft_cap=soft_cap, sink_HG=sink)
                atol, _ = error_bound(*segment, SCALE)
                ours = out[row, head, :, first:].double()
                torch.testing.assert_close(ours, expected[0, 0], rtol=0, atol=atol)
        self.assert_evidence(result, soft_cap)
        return result

    def assert_evidence(self, result: DecodeAttention, soft_cap: float | None) -> None:
        """Compare the slow requests' logits with Eq. 4 for their last query, and the sum over J."""
        slow = [row for row, mode in enumerate(self.modes) if mode == fields.SLOW]
        assert result.logits_BHGWT.shape[:4] == (len(slow), H, self.G, 1)
        for (place, row), head in product(enumerate(slow), range(H)):
            key, value = self.visible_rows(row, head)
            query = self.query[row, head, :, -1:][None, None]
            _, bound = error_bound(query, key, value, SCALE)
            expected = query[0, 0, :, 0].double() @ key[0, 0].double().mT * SCALE
            if soft_cap is not None:
                expected = soft_cap * torch.tanh(expected / soft_cap)
            logits = result.logits_BHGWT[place, head, :, 0, : self.lengths[row]].double()
            torch.testing.assert_close(logits[:, : key.shape[2]], expected, rtol=0, atol=bound)
            assert (logits[:, key.shape[2] :] == -torch.inf).all()
            in_J = expected[:, min(SINK, self.lengths[row]) : self.starts[row]].logsumexp(-1)
            sums = result.log_sum_BHGW[place, head, :, 0].double()
            torch.testing.assert_close(sums, in_J, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", first([torch.float32, torch.float16, torch.bfloat16]))
def test_requests_with_any_number_of_queries_share_a_step(backend: str, dtype: torch.dtype):
    Verification(backend, DRAFTED, DRAFT_MODES, dtype=dtype).assert_plain()


@pytest.mark.parametrize("W", first([16, 2, 1, 8, 9], 2))
def test_every_number_of_queries_up_to_a_drafts_most(backend: str, W: int):
    """The draft of 16 tokens, the default's most, and the token before."""
    counts = [W, 1, max(1, W - 1)]
    Verification(backend, [130, 65, 64], [fields.SLOW, fields.FAST, fields.SLOW], counts=counts, W=W).assert_plain()


@pytest.mark.parametrize("length", first([65, 17, 63, 80, 128], 2))
def test_the_causal_limit_lies_anywhere_in_a_tile(backend: str, length: int):
    Verification(backend, [length, length], [fields.SLOW, fields.SLOW], counts=[17, 9]).assert_plain()


@pytest.mark.parametrize(
    ("G", "D", "E", "W"), first([(4, 24, 40, 9), (3, 160, 160, 17), (1, 16, 16, 17), (8, 16, 16, 17)], 2)
)
def test_heads_and_groups_of_any_size(backend: str, G: int, D: int, E: int, W: int):
    """Up to 136 rows, more than the largest tile has; 51 rows of wide heads make two tiles in float32."""
    step = Verification(backend, [70, 65], [fields.SLOW, fields.SLOW], G=G, D=D, E=E, counts=[W, 2], W=W)
    step.assert_plain()


@pytest.mark.parametrize("places", first([2, 64, 8], 2))
def test_the_plan_does_not_change_what_several_queries_give(backend: str, places: int):
    """One split a request, a few, many, one that only the last queries see; a learned sink takes its weight once."""
    step = Verification(backend, [513, 300], [fields.SLOW, fields.FAST], counts=[9, 1], W=9, places=places)
    splits = step.descriptor().table_BX[:, fields.SPLITS].tolist()
    assert (max(splits) == 1) == (places == 2)
    step.assert_plain(sink_HG=torch.tensor([[2.0, -1.0], [0.0, 4.0]]))


def test_the_last_query_hands_out_its_logits(backend: str):
    step = Verification(backend, [150, 65, 17], [fields.SLOW, fields.FAST, fields.SLOW], counts=[5, 1, 17])
    room = torch.full((2 * H * 2 * 151,), torch.nan)
    result = step.assert_plain(into=room)
    assert torch.equal(result.out_BHGWE, step.attend().out_BHGWE)


def test_a_draft_of_one_token_attends_as_a_step_does(backend: str):
    """Bit for bit: the rows of W and those of one query lie in the same tile."""
    step = Verification(backend, [300, 65], [fields.SLOW, fields.FAST], counts=[1, 1], W=4)
    alone = replace(step, W=1)
    alone.__dict__.update({n: getattr(step, n) for n in ("key_PHND", "value_PHNE", "packed")})
    alone.query = step.query[:, :, :, -1:]
    result, expected = (verification.attend(evidence=True) for verification in (step, alone))
    assert torch.equal(result.out_BHGWE[:, :, :, -1:], expected.out_BHGWE)
    assert torch.equal(result.logits_BHGWT, expected.logits_BHGWT)
    assert torch.equal(result.log_sum_BHGW, expected.log_sum_BHGW)


def test_a_pass_has_room_for_every_requests_queries(backend: str):
    step = Verification(backend, [300, 65], [fields.SLOW, fields.FAST], counts=[5, 1], W=5)
    operands = step.operands()
    operands["query_BHGWD"] = operands["query_BHGWD"][:, :, :, 1:]
    with pytest.raises(ValueError, match=r"^query must have W >= 5, got \[2, 2, 2, 4, 16\]$"):
        decode_attention.on(backend)(**operands, descriptor=step.descriptor(), scale=SCALE)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("full", [False, True])
def test_every_query_has_a_row_and_tiles_divide_pages(capability: int, full: bool):
    for G, W, D in product((1, 3, 4, 8, 16), (1, 2, 8, 9, 17), (64, 128, 256)):
        chip, dtype = Target(capability, 132), torch.float32 if full else torch.bfloat16
        key = torch.empty(1, 1, 64, D, dtype=dtype)
        parts = parts_of_pass(G, W, tile_shape(key, key, 64, chip), chip, full=full)
        assert [kind for kind, _, _ in parts] == ([EACH] if W == 1 else [LAST, SEVERAL])
        queries = [G] if W == 1 else [G, G * W]
        for (_, tile, tiles), rows in zip(parts, queries, strict=True):
            assert (tiles - 1) * tile.rows < rows <= tiles * tile.rows
            assert fields.UNIT % tile.tokens == 0
