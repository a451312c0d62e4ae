"""A step's attention with mixed requests, whose heads read everything or sparsely, or with pseudo tokens."""

from typing import Any

import pytest
import torch

from sfi_kernels.decode_attention import decode_attention, sparse_attention
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.step_descriptor import (
    ALLOWED_STOP,
    FAST,
    IDLE,
    MIXED,
    PACKED,
    PROMPT,
    SLOW,
    SPLITS,
    START,
    StepRequest,
    describe_step,
)
from tests.fakes import error_bound
from tests.kernels.test_decode_attention import SCALE, SINK, H, Step

# mixed and not, in one launch: of 130 tokens a head reads 70 packed rows and four units, one more than the
# dense read has; of 1000 a sparse head has fewer units than work items
LENGTHS = [1000, 130, 150, 65, 130, 3, 64, 200]
MODES = [FAST, FAST, SLOW, SLOW, IDLE, FAST, FAST, SLOW]
DENSE = [[1, 0], [0, 0], [0, 1], [0, 0], [1, 0], [0, 1], [1, 1], [1, 0]]
MIXED_ROWS = (0, 1, 2, 4, 5, 7)
FEW, FEW_MODES = [200, 65, 130, 64], [SLOW, FAST, IDLE, FAST]
SINK_HG = torch.tensor([[2.0, -1.0], [0.0, 4.0]])


def step_of(backend: str, **changes: Any) -> Step:
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
    step = step_of(backend, lengths=[1000, 130], modes=[FAST, SLOW], dense=[[0, 1], [1, 0]],
                   mixed=(0, 1), places=places)  # fmt: skip
    splits = step.descriptor().table_BX[:, SPLITS].tolist()
    assert (max(splits) == 1) == (places == 2)
    step.assert_plain()


@pytest.mark.parametrize(("page_size", "recent"), [(16, 1), (64, 64), (128, 199)])
def test_a_sparse_head_s_recent_segment_begins_anywhere_in_pages_of_any_size(backend: str, page_size: int, recent: int):
    """A learned sink and a soft cap hold for both kinds of heads."""
    two = {"lengths": [200, 130], "modes": [FAST, SLOW], "dense": [[0, 1], [1, 0]], "mixed": (0, 1)}
    step = step_of(backend, page_size=page_size, recent=recent, **two)
    step.assert_plain(sink_HG=SINK_HG, soft_cap=0.5)


def test_dense_heads_of_slow_requests_hand_out_their_logits(backend: str):
    """Eq. 4 and the sum over J; what sparse heads hand out is -inf, which the Selector can tell."""
    step = step_of(backend)
    into = torch.full((MODES.count(SLOW) * H * 2 * max(LENGTHS),), torch.inf)
    result = step.attend(evidence=True, into=into)
    slow = [row for row, mode in enumerate(MODES) if mode == SLOW]
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
            got = result.logits_BHGWT[place, head, :, 0, : LENGTHS[row]].double()
            torch.testing.assert_close(got, expected, rtol=0, atol=bound)
            in_J = expected[:, SINK : step.starts[row]].logsumexp(-1)
            torch.testing.assert_close(log_sum.double(), in_J, rtol=0, atol=bound)
    assert torch.equal(result.out_BHGWE, step.attend().out_BHGWE)


def test_marks_and_mixed_requests_come_together(backend: str):
    step = step_of(backend)
    operands, descriptor = step.operands(), step.descriptor()
    dense_BH = operands.pop("dense_BH")

    def run(descriptor: Any, **marks: Any) -> Any:
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
    numbers: Any = {"length": 130, "recent_start": 101, "packed": 36, "sink": 4}
    modes = (FAST, SLOW, IDLE, PROMPT)
    requests = [StepRequest(mode=mode, **numbers, mixed=True) for mode in modes]
    requests.append(StepRequest(mode=FAST, **numbers))
    requests.append(StepRequest(mode=SLOW, **numbers, mixed=True, sparse_start=40))
    step = describe_step(requests, 3, torch.device("cpu"))
    words = step.table_BX[:, [MIXED, START, PACKED, ALLOWED_STOP]].tolist()
    assert words[:2] == [[102, 0, 0, 101]] * 2
    assert words[2:5] == [[0, 101, 36, 101]] * 3
    assert words[5] == [41, 0, 0, 101]
    assert (step.mixed, step.slow, step.fast) == ((0, 1, 5), (1, 5), (0, 4))


def pseudo_of(step: Step) -> PseudoToken:
    """Draw one for the fast requests; it weighs as much as some of their keys. The others' value is NaN."""
    fast_B = torch.tensor([mode == FAST for mode in step.modes])
    logit = torch.randn(len(step.modes), H, step.G) * 2
    value, none = torch.randn(len(step.modes), H, step.E), ~fast_B[:, None, None]
    return PseudoToken(logit.masked_fill(none, -torch.inf), value.masked_fill(none, torch.nan))


def none_of(pseudo: PseudoToken) -> PseudoToken:
    return pseudo._replace(logit_BHG=torch.full_like(pseudo.logit_BHG, -torch.inf))


def attend(step: Step, pseudo: PseudoToken | None, **options: Any) -> torch.Tensor:
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


def assert_plain(step: Step, **options: Any) -> None:
    pseudo = pseudo_of(step)
    out = attend(step, pseudo, **options)
    assert out.dtype == step.dtype
    for row, mode in enumerate(step.modes):
        if mode == IDLE:
            assert (out[row] == 0).all()
            continue
        for head in range(H):
            segment = step.query[row, head][None, None, :, None], *step.visible_rows(row, head)
            atol, _ = error_bound(*segment, SCALE)
            largest = float(pseudo.value_BHE.nan_to_num().abs().max() / segment[2].abs().max())
            expected = plain(step, pseudo, row, head, **options)
            got = out[row, head].double()
            torch.testing.assert_close(got, expected, rtol=0, atol=atol * max(1, largest))


@pytest.mark.parametrize(("places", "options"), [(2, {}), (64, {"sink_HG": SINK_HG}), (64, {"soft_cap": 0.5})])
def test_it_takes_its_share_once_however_often_the_keys_are_split(backend: str, places: int, options: dict[str, Any]):
    """Beside slow requests, which have none, and an idle one."""
    step = Step(backend, FEW, FEW_MODES, places=places)
    splits = step.descriptor().table_BX[:, SPLITS].tolist()
    assert (max(splits) == 1) == (places == 2)
    assert_plain(step, **options)


@pytest.mark.parametrize(("G", "E"), [(1, 16), (3, 40)])
def test_each_query_head_has_its_own_logit_and_each_kv_head_its_own_value(backend: str, G: int, E: int):
    assert_plain(Step(backend, [65, 130], [FAST, SLOW], G=G, E=E))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_meets_keys_of_half_precision(backend: str, dtype: torch.dtype):
    assert_plain(Step(backend, [130, 65], [FAST, FAST], dtype=dtype))


@pytest.mark.parametrize(("places", "options"), [(2, {}), (64, {"sink_HG": SINK_HG})])
def test_a_logit_of_minus_infinity_changes_nothing(backend: str, places: int, options: dict[str, Any]):
    """Bit for bit in the kernels; the reference joins three parts in other steps than two."""
    step = Step(backend, FEW, FEW_MODES, places=places)
    got, without = attend(step, none_of(pseudo_of(step)), **options), attend(step, None, **options)
    if backend == "triton":
        assert torch.equal(got.view(torch.int32), without.view(torch.int32))
    else:
        torch.testing.assert_close(got, without)


def test_one_that_outweighs_every_key_is_the_output(backend: str):
    """Neither its exponential nor that of keys far below it may leave the range of float32."""
    step = Step(backend, [300, 65], [FAST, FAST], places=64)
    pseudo = pseudo_of(step)
    pseudo = pseudo._replace(logit_BHG=torch.full_like(pseudo.logit_BHG, 1e4))
    expected = pseudo.value_BHE[:, :, None].expand(2, H, 2, -1)
    torch.testing.assert_close(attend(step, pseudo), expected, rtol=0, atol=1e-6)


def test_the_evidence_of_slow_requests_does_not_see_it(backend: str):
    step = Step(backend, [300, 65], [SLOW, FAST])
    pseudo = PseudoToken(*(part.to(step.device) for part in pseudo_of(step)))
    got, without = step.attend(evidence=True, pseudo=pseudo), step.attend(evidence=True)
    assert torch.equal(got.logits_BHGWT, without.logits_BHGWT)
    assert torch.equal(got.log_sum_BHGW, without.log_sum_BHGW)


def test_the_fast_step_alone_takes_it_as_well(backend: str):
    step = Step(backend, [65, 300], [FAST, FAST])
    operands, pseudo = step.operands(), pseudo_of(step)
    numbers = [torch.tensor(x).int().to(step.device) for x in (step.starts, step.lengths)]
    query_BHGD = operands.pop("query_BHGWD")[:, :, :, 0]
    moved = PseudoToken(*(part.to(step.device) for part in pseudo))
    run = sparse_attention.on(backend)
    got = run(query_BHGD, *operands.values(), *numbers, scale=SCALE, pseudo=moved)
    torch.testing.assert_close(got.cpu(), attend(step, pseudo))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("logit_BHG", lambda x: x[:, :1], r"^pseudo logit must be \[B=2, H=2, G=2\], got \[2, 1, 2\]$"),
        ("value_BHE", lambda x: x[..., :3], r"^pseudo value must be \[B=2, H=2, E=16\], got \[2, 2, 3\]$"),
    ],
)
def test_one_that_does_not_fit_is_named(backend: str, name: str, change: Any, message: str):
    step = Step(backend, [65, 130], [FAST, SLOW])
    pseudo = pseudo_of(step)
    with pytest.raises(ValueError, match=message):
        attend(step, pseudo._replace(**{name: change(getattr(pseudo, name))}))


def test_a_step_with_mixed_requests_has_none(backend: str):
    step = Step(backend, [65, 130], [FAST, SLOW], dense=[[1, 0], [0, 1]], mixed=(0, 1))
    with pytest.raises(ValueError, match=r"^pseudo must be None in a step with mixed requests"):
        decode_attention.on(backend)(
            **step.operands(), descriptor=step.descriptor(), scale=SCALE, pseudo=pseudo_of(step)
        )
