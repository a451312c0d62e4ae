"""Steps in which some KV heads of a request read everything and others sparsely, against float64."""

from typing import Any

import pytest
import torch

from sfi_kernels.decode_attention import decode_attention
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
    step.assert_plain(sink_HG=torch.tensor([[2.0, -1.0], [0.0, 4.0]]), soft_cap=0.5)


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
