"""The step descriptor: one buffer that every layer of a pass reads."""

from dataclasses import replace

import pytest
import torch

from sfi_kernels import step_descriptor as module
from sfi_kernels.step_descriptor import (
    ALLOWED_START,
    ALLOWED_STOP,
    EVIDENCE,
    FAST,
    FIRST,
    IDLE,
    LENGTH,
    MIXED,
    MODE,
    PACKED,
    PROMPT,
    QUERIES,
    SINK,
    SLOW,
    SPLITS,
    START,
    WORDS,
    StepRequest,
    describe_step,
)

CPU = torch.device("cpu")
RAGGED = (
    StepRequest(mode=SLOW, length=130, recent_start=101, packed=36, sink=4),
    StepRequest(mode=IDLE, length=77, recent_start=50, packed=20, sink=3, count=0),
    StepRequest(mode=FAST, length=1000, recent_start=873, packed=68, sink=5),
    StepRequest(mode=SLOW, length=2000, recent_start=1900, packed=40, sink=2),
    StepRequest(mode=FAST, length=9, recent_start=1, packed=1, sink=1),
)


def test_the_words_of_a_ragged_batch():
    """Slow requests read no packed token and every page; candidates lie between sink and recent tokens."""
    step = describe_step(RAGGED, 3, CPU)
    named = [MODE, LENGTH, SINK, START, PACKED, ALLOWED_START, ALLOWED_STOP, EVIDENCE, QUERIES, FIRST, SPLITS, MIXED]
    assert sorted(named) == list(range(12))
    assert step.table_BX[:, [*named, *range(12, WORDS)]].tolist() == [
        [*words, *[0] * (WORDS - 9)]
        for words in (
            [SLOW, 130, 4, 0, 0, 4, 101, 0, 1],
            [IDLE, 77, 3, 50, 20, 3, 50, -1, 0],
            [FAST, 1000, 5, 873, 68, 5, 873, -1, 1],
            [SLOW, 2000, 2, 0, 0, 2, 1900, 1, 1],
            [FAST, 9, 1, 1, 1, 1, 1, -1, 1],
        )
    ]
    assert (IDLE, PROMPT, FAST, SLOW) == (0, 1, 2, 3)
    assert (step.slow, step.longest) == ((0, 3), 2000)
    assert [part.tolist() for part in step.slow_R] == [[0, 3], [4, 2], [130, 2000], [101, 1900]]
    assert step.work_XI.tolist() == [[-1] * 4] * 3


def test_the_lists_hold_lengths_new_tokens_and_recent_starts():
    prompt = StepRequest(mode=SLOW, length=40, recent_start=30, packed=0, sink=4, count=40)
    step = describe_step([*RAGGED, prompt], 0, CPU)
    assert step.length_B.tolist() == [130, 77, 1000, 2000, 9, 40]
    assert step.append_start_B.tolist() == [129, 77, 999, 1999, 8, 0]
    assert step.append_count_B.tolist() == [1, 0, 1, 1, 1, 40]
    assert step.recent_start_B.tolist() == [101, 50, 873, 1900, 1, 30]


def test_without_a_slow_request_the_slow_lists_are_empty():
    step = describe_step([RAGGED[1], RAGGED[2]], 3, CPU)
    assert (step.slow, step.longest) == ((), 0)
    assert [part.shape for part in step.slow_R] == [(0,)] * 4


@pytest.mark.parametrize("batch", range(1, 10))
def test_every_view_lies_in_the_one_buffer_apart_and_aligned(batch: int):
    """Aligned: whether an address divides by 16 is part of what a kernel is compiled for."""
    requests = [RAGGED[row % 5] for row in range(batch)]
    step = describe_step(requests, 6, CPU)
    views = [step.length_B, step.append_start_B, step.append_count_B, *step.slow_R, step.table_BX, step.work_XI]
    assert step.buffer.dtype == torch.int32
    assert step.batch == batch
    assert (step.table_BX.shape, step.work_XI.shape) == ((batch, WORDS), (6, 4))
    step.buffer[:] = 0
    for number, view in enumerate(views, 1):
        assert view.is_contiguous()
        assert view.data_ptr() % 16 == 0
        view.add_(number)  # a view that overlapped another would leave its number in it
    for number, view in enumerate(views, 1):
        assert (view == number).all()
    total = sum(number * view.numel() for number, view in enumerate(views, 1))
    assert int(step.buffer.sum()) == total  # all of them were the buffer's own memory


def test_the_queries_of_a_request_that_decodes_are_its_new_tokens():
    draft = replace(RAGGED[0], count=9)
    prompt = replace(RAGGED[1], mode=PROMPT, count=20)
    step = describe_step([*RAGGED, draft, prompt], 0, CPU)
    assert step.work_XI.shape == (0, 4)
    assert step.table_BX[:, QUERIES].tolist() == [1, 0, 1, 1, 1, 9, 0]
    assert step.queries == 9
    assert describe_step([RAGGED[1], prompt], 0, CPU).queries == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": FAST, "count": 2},
        {"mode": SLOW, "count": 2, "mixed": True},
        {"mode": SLOW, "count": 131},
        {"mode": SLOW, "count": 0},
    ],
)
def test_only_a_slow_request_that_is_not_mixed_has_several_queries(changes: dict[str, int]):
    rule = "^count must be at most its length in a slow request, and 1 in a fast or mixed one, got"
    with pytest.raises(ValueError, match=rf"{rule} {changes['count']} of 130 cached tokens$"):
        describe_step([replace(RAGGED[0], **changes)], 0, CPU)
    longest = replace(RAGGED[0], count=130)
    assert describe_step([longest], 0, CPU).append_start_B.tolist() == [0]


def test_the_buffer_is_sent_once(monkeypatch):
    sent = []
    monkeypatch.setattr(module, "sent", lambda tensor, device, _: sent.append(device) or tensor)
    step = describe_step(RAGGED, 3, CPU)
    assert sent == [CPU]
    assert step.work_XI.untyped_storage().data_ptr() == step.buffer.untyped_storage().data_ptr()


def test_the_device_gets_what_the_host_wrote(kernel_device):
    step = describe_step(RAGGED, 3, torch.device(kernel_device))
    assert step.buffer.device.type == kernel_device
    assert torch.equal(step.buffer.cpu(), describe_step(RAGGED, 3, CPU).buffer)
