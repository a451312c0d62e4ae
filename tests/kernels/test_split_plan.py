"""The split plan, and the step descriptor: one buffer that every layer of a pass reads."""

import random
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import pytest
import torch

from sfi_kernels import step_descriptor as fields
from sfi_kernels import step_descriptor as module
from sfi_kernels.decode_attention import split_plan, work_items
from sfi_kernels.decode_attention.reference import MAX_SPLITS, MIN_UNITS

CPU = torch.device("cpu")
UNUSED = [-1, 0, 0, 0]


@dataclass(frozen=True)
class Batch:
    """Requests, KV heads and the programs that run at once."""

    requests: tuple[fields.StepRequest, ...]
    heads: int = 8
    programs: int = 264

    @cached_property
    def units(self) -> list[int]:
        """Count the units of every request, one token at a time where it could go wrong."""
        counts = []
        for request in self.requests:
            slow = request.mode == fields.SLOW
            packed, start = (0, 0) if slow else (request.packed, request.recent_start)
            pages = len({start // fields.UNIT, *range(start // fields.UNIT, (request.length - 1) // fields.UNIT + 1)})
            counts.append(0 if request.mode < fields.FAST else -(-packed // fields.UNIT) + pages)
        return counts

    @cached_property
    def least(self) -> int:
        """The least size: a tenth more than fills the processors once, and no more than 64 splits."""
        units = self.units
        fill = -(-11 * self.heads * sum(units) // (10 * self.programs))
        return max(MIN_UNITS, fill, -(-max(units) // MAX_SPLITS))

    def described(self, device: torch.device = CPU, spare: int = 0) -> fields.StepDescriptor:
        """Describe the batch; what a plan has to write is poisoned."""
        room = work_items(len(self.requests), self.heads, self.programs) + spare
        step = fields.describe_step(self.requests, room, device)
        step.work_XI[:] = -7
        step.table_BX[:, fields.FIRST], step.table_BX[:, fields.SPLITS] = -7, -7
        return step

    def planned(self) -> fields.StepDescriptor:
        step = self.described()
        split_plan.reference(step, self.heads, self.programs)
        return step


def request(
    mode: int = fields.FAST, length: int = 1000, packed: int = 0, recent: int | None = None
) -> fields.StepRequest:
    start = max(0, length - 100) if recent is None else length - recent
    return fields.StepRequest(mode=mode, length=length, recent_start=start, packed=packed, sink=4)


def drawn(seed: int, longest: int = 300_000) -> Batch:
    """Draw a batch; lengths of all magnitudes, and often right beside a multiple of a unit."""
    draw = random.Random(seed)
    requests = []
    for _ in range(draw.choice([1, 2, 3, 7, 8, 20, 64])):
        length = min(longest, int(2 ** draw.uniform(0, 18.2)))
        if draw.random() < 0.5:
            length = max(1, min(longest, length // fields.UNIT * fields.UNIT + draw.choice([-1, 0, 1])))
        recent = draw.randint(1, length)
        mode = draw.choice([fields.IDLE, fields.PROMPT, fields.FAST, fields.FAST, fields.SLOW])
        requests.append(request(mode, length, draw.choice([0, 1, 63, 64, 65, 2048, length]), recent))
    return Batch(tuple(requests), draw.randint(1, 16), draw.choice([1, 2, 7, 8, 40, 264, 400]))


def items_of(step: fields.StepDescriptor) -> list[list[list[int]]]:
    work = step.work_XI.tolist()
    places = step.table_BX[:, [fields.FIRST, fields.SPLITS]].tolist()
    return [work[first : first + splits] for first, splits in places]


def uneven(seed: int) -> Batch:
    """Draw 64 slow requests of all magnitudes, four waves of programs at the least."""
    draw = random.Random(seed)
    lengths = [fields.UNIT * int(2 ** draw.uniform(0, 12)) for _ in range(64)]
    return Batch(tuple(request(fields.SLOW, length) for length in lengths), heads=16)


EXTREMES = [
    Batch((request(fields.SLOW, length),) * count, heads, programs)
    for length, count in ((1, 1), (1, 64), (300_000, 1), (300_000, 64))
    for heads in (1, 16)
    for programs in (1, 40, 400)
]
# what a wave costs beyond its units decides this one's size
WAVES = uneven(26)
IDLES = Batch((request(fields.IDLE), request(fields.IDLE, 1)))
BATCHES = [*map(drawn, range(60)), *EXTREMES, WAVES, IDLES]


@pytest.fixture(scope="module")
def plans() -> list[tuple[Batch, fields.StepDescriptor]]:
    return [(batch, batch.planned()) for batch in BATCHES]


def test_every_unit_is_read_once_in_items_that_stand_close_together(plans):
    """Requests that do not decode have none, the others 1 to 64 each; slow requests come first."""
    for batch, step in plans:
        places, work = step.table_BX[:, fields.SPLITS].tolist(), step.work_XI.tolist()
        assert max(places) <= MAX_SPLITS == 64
        used = sum(places)
        assert used <= len(work) == work_items(len(batch.requests), batch.heads, batch.programs)
        assert work[used:] == [UNUSED] * (len(work) - used)
        order = [(-batch.requests[row].mode, row) for row, *_ in work[:used]]
        assert order == sorted(order)
        for row, (units, items) in enumerate(zip(batch.units, items_of(step), strict=True)):
            assert bool(items) == (batch.requests[row].mode not in (fields.IDLE, fields.PROMPT))
            assert all(item[0] == row and item[2] > 0 for item in items)
            reached = [0, *accumulate(item[2] for item in items)]
            assert [item[1] for item in items] == reached[:-1]
            assert reached[-1] == units


def test_work_items_is_never_exceeded_by_lengths_made_to_round_up():
    """Each request one unit beyond a multiple of some size."""
    for size in (2, 3, 5, 8, 13, 64, 300):
        for count, heads, programs in ((1, 1, 400), (16, 4, 264), (64, 1, 400), (5, 3, 7)):
            requests = tuple(request(fields.SLOW, (size * (row % 4 + 1) + 1) * fields.UNIT) for row in range(count))
            Batch(requests, heads, programs).planned()  # an IndexError if there were no room


def test_items_are_about_one_size(plans):
    """A request's are all alike but the last, and at most twice and no less than half of the least size."""
    for batch, step in plans:
        for items in items_of(step):
            sizes = [item[2] for item in items]
            if sizes:
                assert set(sizes[:-1]) <= {sizes[0]}
                assert sizes[-1] <= sizes[0] < 2 * batch.least
            if len(sizes) > 1:
                assert 2 * sizes[0] > batch.least


def test_no_other_size_that_is_tried_costs_less(plans):
    """In units: waves of an item and two more."""

    def cost(batch: Batch, splits: list[int], size: int) -> int:
        return -(-sum(splits) * batch.heads // batch.programs) * (size + 2)

    for batch, step in plans:
        sizes = [batch.least + batch.least * eighth // 8 for eighth in range(8)]
        plan = {size: [-(-units // size) for units in batch.units] for size in sizes}
        costs = {size: cost(batch, splits, size) for size, splits in plan.items()}
        chosen = [size for size in sizes if plan[size] == step.table_BX[:, fields.SPLITS].tolist()]
        assert chosen
        assert min(costs[size] for size in chosen) == min(costs.values())


def test_one_fast_request_is_split_as_finely_as_an_item_may_be():
    """37 units of 8 KV heads leave processors idle, and joining 19 parts takes no longer than joining 13."""
    step = Batch((request(fields.FAST, 8192, packed=2052, recent=256),), heads=8, programs=264).planned()
    (items,) = items_of(step)
    assert len(items) == 19
    assert max(item[2] for item in items) == MIN_UNITS


def test_no_other_word_is_touched():
    batch = drawn(5)
    before, after = batch.described(), batch.planned()
    others = [word for word in range(16) if word not in (fields.FIRST, fields.SPLITS)]
    assert torch.equal(before.table_BX[:, others], after.table_BX[:, others])
    begin = before.work_XI.storage_offset() - before.table_BX.numel()
    assert torch.equal(before.buffer[:begin], after.buffer[:begin])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_too_little_room_is_refused(backend: str):
    if backend == "triton":
        pytest.importorskip("triton")
    step = fields.describe_step([request()] * 3, 5, CPU)
    message = r"^descriptor must have room for 6 work items, got 5$"
    with pytest.raises(ValueError, match=message):
        split_plan.on(backend)(step, 4, 12)


def same_in_triton(batch: Batch, device: str, spare: int = 0) -> bool:
    home = torch.device(device)
    reference, kernel = batch.described(spare=spare), batch.described(home, spare)
    split_plan.reference(reference, batch.heads, batch.programs)
    split_plan.triton(kernel, batch.heads, batch.programs)
    return torch.equal(kernel.buffer.cpu(), reference.buffer)


@pytest.mark.parametrize(
    ("batch", "spare"),
    [
        *((drawn(seed), spare) for seed, spare in enumerate((0, 1, 127, 128, 300))),
        *((batch, 0) for batch in (*EXTREMES[::5], WAVES, IDLES)),
    ],
    ids=lambda value: f"{value.heads}-{value.programs}" if isinstance(value, Batch) else value,
)
def test_triton_plans_the_same(kernel_device, batch: Batch, spare: int):
    pytest.importorskip("triton")
    assert same_in_triton(batch, kernel_device, spare)


RAGGED = (
    fields.StepRequest(mode=fields.SLOW, length=130, recent_start=101, packed=36, sink=4),
    fields.StepRequest(mode=fields.IDLE, length=77, recent_start=50, packed=20, sink=3, count=0),
    fields.StepRequest(mode=fields.FAST, length=1000, recent_start=873, packed=68, sink=5),
    fields.StepRequest(mode=fields.SLOW, length=2000, recent_start=1900, packed=40, sink=2),
    fields.StepRequest(mode=fields.FAST, length=9, recent_start=1, packed=1, sink=1),
)


def test_the_words_of_a_ragged_batch():
    step = fields.describe_step(RAGGED, 3, CPU)
    named = [
        fields.MODE,
        fields.LENGTH,
        fields.SINK,
        fields.START,
        fields.PACKED,
        fields.ALLOWED_START,
        fields.ALLOWED_STOP,
        fields.EVIDENCE,
        fields.QUERIES,
        fields.SLOT,
        fields.FIRST,
        fields.SPLITS,
        fields.MIXED,
    ]
    assert sorted(named) == list(range(13))
    assert step.table_BX[:, [*named, *range(13, fields.WORDS)]].tolist() == [
        [*words, *[0] * (fields.WORDS - 10)]
        for words in (
            [fields.SLOW, 130, 4, 0, 0, 4, 101, 0, 1, 0],
            [fields.IDLE, 77, 3, 50, 20, 3, 50, -1, 0, 1],
            [fields.FAST, 1000, 5, 873, 68, 5, 873, -1, 1, 2],
            [fields.SLOW, 2000, 2, 0, 0, 2, 1900, 1, 1, 3],
            [fields.FAST, 9, 1, 1, 1, 1, 1, -1, 1, 4],
        )
    ]
    assert (fields.IDLE, fields.PROMPT, fields.FAST, fields.SLOW) == (0, 1, 2, 3)
    assert (step.slow, step.longest) == ((0, 3), 2000)
    assert [part.tolist() for part in step.slow_R] == [[0, 3], [4, 2], [130, 2000], [101, 1900]]
    assert step.work_XI.tolist() == [[-1] * 4] * 3


def test_the_lists_hold_lengths_new_tokens_and_recent_starts():
    prompt = fields.StepRequest(mode=fields.SLOW, length=40, recent_start=30, packed=0, sink=4, count=40)
    step = fields.describe_step([*RAGGED, prompt], 0, CPU)
    assert step.length_B.tolist() == [130, 77, 1000, 2000, 9, 40]
    assert step.append_start_B.tolist() == [129, 77, 999, 1999, 8, 0]
    assert step.append_count_B.tolist() == [1, 0, 1, 1, 1, 40]
    assert step.recent_start_B.tolist() == [101, 50, 873, 1900, 1, 30]


def test_without_a_slow_request_the_slow_lists_are_empty():
    step = fields.describe_step([RAGGED[1], RAGGED[2]], 3, CPU)
    assert (step.slow, step.longest) == ((), 0)
    assert [part.shape for part in step.slow_R] == [(0,)] * 4


@pytest.mark.parametrize("batch", range(1, 10))
def test_every_view_lies_in_the_one_buffer_apart_and_aligned(batch: int):
    """Aligned: whether an address divides by 16 is part of what a kernel is compiled for."""
    requests = [RAGGED[row % 5] for row in range(batch)]
    step = fields.describe_step(requests, 6, CPU)
    views = [step.length_B, step.append_start_B, step.append_count_B, *step.slow_R, step.table_BX, step.work_XI]
    assert step.buffer.dtype == torch.int32
    assert step.batch == batch
    assert (step.table_BX.shape, step.work_XI.shape) == ((batch, fields.WORDS), (6, 4))
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
    prompt = replace(RAGGED[1], mode=fields.PROMPT, count=20)
    step = fields.describe_step([*RAGGED, draft, prompt], 0, CPU)
    assert step.work_XI.shape == (0, 4)
    assert step.table_BX[:, fields.QUERIES].tolist() == [1, 0, 1, 1, 1, 9, 0]
    assert step.queries == 9
    assert fields.describe_step([RAGGED[1], prompt], 0, CPU).queries == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": fields.FAST, "count": 2},
        {"mode": fields.SLOW, "count": 2, "mixed": True},
        {"mode": fields.SLOW, "count": 131},
        {"mode": fields.SLOW, "count": 0},
    ],
)
def test_only_a_slow_request_that_is_not_mixed_has_several_queries(changes: dict[str, int]):
    rule = "^count must be at most its length in a slow request, and 1 in a fast or mixed one, got"
    with pytest.raises(ValueError, match=rf"{rule} {changes['count']} of 130 cached tokens$"):
        fields.describe_step([replace(RAGGED[0], **changes)], 0, CPU)
    longest = replace(RAGGED[0], count=130)
    assert fields.describe_step([longest], 0, CPU).append_start_B.tolist() == [0]


def test_the_buffer_is_sent_once(monkeypatch):
    sent = []
    monkeypatch.setattr(module, "sent", lambda tensor, device, _: sent.append(device) or tensor)
    step = fields.describe_step(RAGGED, 3, CPU)
    assert sent == [CPU]
    assert step.work_XI.untyped_storage().data_ptr() == step.buffer.untyped_storage().data_ptr()


def test_the_device_gets_what_the_host_wrote(kernel_device):
    step = fields.describe_step(RAGGED, 3, torch.device(kernel_device))
    assert step.buffer.device.type == kernel_device
    assert torch.equal(step.buffer.cpu(), fields.describe_step(RAGGED, 3, CPU).buffer)
