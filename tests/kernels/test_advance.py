"""Advancing a batch by a step on the device: the rules one by one, and Triton's the same."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from sfi_kernels.advance import StepRules, advance, bitmaps
from sfi_kernels.advance.state import (
    DUE,
    FAST_STEP,
    FINISHED,
    LENGTH,
    MOST,
    PACKED,
    REASON,
    RECENT_START,
    SINCE_SLOW,
    SINK,
    SLOW_START,
    STATE_WORDS,
    STEP,
    TRIGGERED,
    TRIGGERS,
    WITH_BATCH,
)
from sfi_kernels.step_descriptor import (
    FAST,
    FIRST,
    IDLE,
    LISTS,
    MODE,
    SLOW,
    WORDS,
    StepDescriptor,
    StepRequest,
    describe_step,
    list_room,
)

CPU = torch.device("cpu")
BOUNDARY, STOP, WORD, BOTH = 7, 100, 1, 31
RULES = StepRules(
    slow_start=1, min_gap=0, t_max=64, delay=0, budget=50, recent=20, sliding=False,
    synchronized=False,
)  # fmt: skip
AT = {
    STEP: 9, LENGTH: 200, RECENT_START: 171, PACKED: 54, SINK: 4, SINCE_SLOW: 5, REASON: FAST_STEP,
    TRIGGERS: 0, FINISHED: 0,
}  # fmt: skip


def blank(batch: int, device: torch.device = CPU, work: int = 3) -> StepDescriptor:
    """Make a descriptor in which nothing is right."""
    requests = [StepRequest(mode=SLOW, length=9, recent_start=5, packed=3, sink=2)] * batch
    descriptor = describe_step(requests, work, device)
    descriptor.buffer[:] = -7
    return descriptor


@dataclass
class Batch:
    """The operands of an op."""

    token_B: torch.Tensor
    bitmap_2X: torch.Tensor
    state_BX: torch.Tensor
    summary_2: torch.Tensor
    descriptor: StepDescriptor
    dense: StepDescriptor | None

    @classmethod
    def of(
        cls, tokens: list[int], states: list[list[int]], *, dense: bool = True, device: str = "cpu"
    ) -> "Batch":
        home = torch.device(device)
        return cls(
            torch.tensor(tokens, device=home),
            bitmaps((BOUNDARY, BOTH), (STOP, BOTH), home),
            torch.tensor(states, dtype=torch.int32, device=home),
            torch.full((2,), -7, dtype=torch.int32, device=home),
            blank(len(tokens), home),
            blank(len(tokens), home) if dense else None,
        )

    def advance(self, rules: StepRules, backend: str = "torch") -> "Batch":
        operands = self.token_B, self.bitmap_2X, self.state_BX, self.summary_2
        advance.on(backend)(*operands, self.descriptor, self.dense, rules)
        return self

    @property
    def results(self) -> list[torch.Tensor]:
        dense = self.dense or self.descriptor
        return [self.state_BX, self.summary_2, self.descriptor.buffer, dense.buffer]


def state(**words: int) -> list[int]:
    """Return a request's words in the middle of a run; names are the words' in small letters."""
    changed = AT | {globals()[name.upper()]: value for name, value in words.items()}
    return [changed[word] for word in range(STATE_WORDS)]


def after(token: int = WORD, *, rules: StepRules = RULES, **words: int) -> dict[int, int]:
    """Advance one request; return its words."""
    made = Batch.of([token], [state(**words)]).advance(rules)
    return dict(enumerate(made.state_BX[0].tolist()))


def test_a_step_goes_on_by_a_token():
    assert after() == AT | {STEP: 10, LENGTH: 201, SINCE_SLOW: 6}


def test_a_boundary_token_makes_the_next_step_slow_and_moves_the_recent_segment():
    """Eq. 5."""
    changed = {REASON: TRIGGERED, SINCE_SLOW: 0, RECENT_START: 181, TRIGGERS: 1}
    assert after(BOUNDARY) == AT | changed | {STEP: 10, LENGTH: 201}


@pytest.mark.parametrize("delay", [0, 1, 3, 30])
def test_a_trigger_is_late_by_its_delay(delay: int):
    words, reasons = state(), []
    for step in range(35):
        token = BOUNDARY if step in (0, 2) else WORD
        made = Batch.of([token], [words]).advance(replace(RULES, delay=delay))
        words = made.state_BX[0].tolist()
        reasons.append(words[REASON])
    assert [step for step, reason in enumerate(reasons) if reason] == [delay, delay + 2]


@pytest.mark.parametrize(("since", "reason"), [(3, FAST_STEP), (4, TRIGGERED)])
def test_a_trigger_too_soon_after_a_slow_step_is_dropped(since: int, reason: int):
    rules = replace(RULES, min_gap=5)
    assert after(BOUNDARY, rules=rules, since_slow=since)[REASON] == reason
    assert after(rules=rules, since_slow=4, triggers=1)[REASON] == FAST_STEP


@pytest.mark.parametrize(("since", "reason"), [(63, FAST_STEP), (64, DUE), (65, DUE)])
def test_a_step_is_due_after_t_max_fast_ones(since: int, reason: int):
    assert after(since_slow=since)[REASON] == reason


def test_no_step_is_due_under_the_largest_number():
    assert after(rules=replace(RULES, t_max=MOST), since_slow=10**9)[REASON] == FAST_STEP


@pytest.mark.parametrize(("step", "reason"), [(0, SLOW_START), (1, SLOW_START), (2, TRIGGERED)])
def test_the_first_steps_are_slow_if_asked(step: int, reason: int):
    rules = replace(RULES, slow_start=3)
    assert after(BOUNDARY, rules=rules, step=step)[REASON] == reason


def test_a_trigger_is_named_when_both_are_due():
    assert after(BOUNDARY, since_slow=64)[REASON] == TRIGGERED


@pytest.mark.parametrize(("start", "packed"), [(171, 54), (54, 54), (53, 53), (4, 4)])
def test_a_slow_step_leaves_the_sinks_and_as_many_as_it_may_select(start: int, packed: int):
    got = after(reason=DUE, recent_start=start, packed=9)
    assert (got[PACKED], got[RECENT_START]) == (packed, start)


def test_a_fast_step_and_one_that_selects_nothing_keep_the_packed_tokens():
    assert after(packed=9)[PACKED] == 9
    assert after(rules=replace(RULES, budget=0), reason=DUE, packed=9)[PACKED] == 9


@pytest.mark.parametrize(("length", "start"), [(200, 181), (22, 4), (5, 4)])
def test_a_sliding_segment_moves_on_fast_steps_too(length: int, start: int):
    sliding = replace(RULES, sliding=True)
    assert after(rules=sliding, length=length, recent_start=4)[RECENT_START] == start
    assert after(length=length, recent_start=4)[RECENT_START] == 4


@pytest.mark.parametrize("token", [STOP, BOTH])
def test_a_stop_token_ends_a_request_where_it_is(token: int):
    got = after(token, reason=DUE, packed=9, since_slow=64)
    changed = {FINISHED: 1, PACKED: 54, TRIGGERS: int(token == BOTH), SINCE_SLOW: 64, REASON: DUE}
    assert got == AT | changed


def test_a_finished_request_stays_as_it_is_whatever_its_token():
    for token in (BOUNDARY, STOP, -1, 10**9):
        wanted = state(finished=1, reason=DUE, packed=9, since_slow=64)
        assert (
            list(after(token, finished=1, reason=DUE, packed=9, since_slow=64).values()) == wanted
        )


@pytest.mark.parametrize("token", [0, 32, 96, 127, 128, 32_007, 2**31 + 7, -1, -28, -121])
def test_a_token_beyond_the_bitmaps_is_in_no_set(token: int):
    """As are those whose bits are others' in another word, or their own counted from the end."""
    got = after(token)
    assert (got[TRIGGERS], got[FINISHED]) == (0, 0)


def test_bitmaps_hold_every_id_and_no_other():
    trigger_ids, stop_ids = {0, 31, 32, 63, 64, 151_000}, {31, -1}
    bitmap_2X = bitmaps(trigger_ids, stop_ids, CPU)
    assert (bitmap_2X.shape, bitmap_2X.dtype) == ((2, 151_000 // 32 + 1), torch.int32)
    for words, ids in zip(bitmap_2X.tolist(), (trigger_ids, {31}), strict=True):
        bits = (
            (32 * place + bit, word >> bit & 1)
            for place, word in enumerate(words)
            for bit in range(32)
        )
        assert {token for token, held in bits if held} == ids


def test_empty_bitmaps_hold_nothing():
    assert bitmaps((), (), CPU).tolist() == [[0], [0]]


def four(**changes: bool) -> Batch:
    """Advance a fast, a finished, a slow and a fast request."""
    states = [state(), state(finished=1, length=77), state(since_slow=64, sink=3), state(packed=60)]
    return Batch.of([WORD, WORD, WORD, WORD], states).advance(replace(RULES, **changes))


def test_one_slow_request_makes_no_other_slow_unless_asked():
    assert four().state_BX[:, REASON].tolist() == [FAST_STEP, FAST_STEP, DUE, FAST_STEP]
    reasons = four(synchronized=True).state_BX[:, REASON].tolist()
    assert reasons == [WITH_BATCH, FAST_STEP, DUE, WITH_BATCH]
    fast = Batch.of([WORD], [state()]).advance(replace(RULES, synchronized=True))
    assert fast.state_BX[:, REASON].tolist() == [FAST_STEP]


def test_a_finished_request_makes_no_other_slow():
    """Its stop token is a trigger, and it is due."""
    states = [state(), state(since_slow=64)]
    made = Batch.of([WORD, BOTH], states).advance(replace(RULES, synchronized=True))
    assert made.descriptor.table_BX[:, MODE].tolist() == [FAST, IDLE]


def test_the_summary_counts_slow_and_fast_requests():
    assert four().summary_2.tolist() == [1, 2]
    assert four(synchronized=True).summary_2.tolist() == [3, 0]
    assert Batch.of([STOP], [state()]).advance(RULES).summary_2.tolist() == [0, 0]


def test_the_descriptors_are_those_the_host_would_write():
    numbers = [
        {"length": 201, "recent_start": 171, "packed": 54, "sink": 4},
        {"length": 77, "recent_start": 171, "packed": 54, "sink": 4, "count": 0},
        {"length": 201, "recent_start": 181, "packed": 54, "sink": 3},
        {"length": 201, "recent_start": 171, "packed": 60, "sink": 4},
    ]
    made = four()
    for got, modes in (
        (made.descriptor, (FAST, IDLE, SLOW, FAST)),
        (made.dense, (SLOW, IDLE, SLOW, SLOW)),
    ):
        requests = [StepRequest(mode=m, **n) for m, n in zip(modes, numbers, strict=True)]
        wanted, lists = describe_step(requests, 0, CPU), LISTS * list_room(4)
        assert torch.equal(got.buffer[:lists], wanted.buffer[:lists])
        assert torch.equal(got.table_BX[:, :FIRST], wanted.table_BX[:, :FIRST])


def test_the_plan_of_the_work_is_not_touched():
    made = four()
    for got in (made.descriptor, made.dense):
        assert (got.table_BX[:, FIRST:WORDS] == -7).all()
        assert (got.work_XI == -7).all()


def drawn(seed: int) -> tuple[list[int], list[list[int]], StepRules]:
    """Draw a batch of any size, in any state, and rules."""
    draw = random.Random(seed)
    batch = draw.choice([1, 2, 3, 4, 5, 7, 8, 9, 33, 64])
    states = []
    for _ in range(batch):
        length = draw.choice([1, 5, 60, 3000, 300_000])
        sink = min(length, draw.choice([0, 4, 9]))
        states.append(
            state(
                length=length,
                sink=sink,
                recent_start=draw.randint(sink, length),
                packed=draw.randint(sink, 70),
                since_slow=draw.choice([0, 1, 2, 4, 5, 7]),
                step=draw.randrange(6),
                triggers=draw.randrange(2**31),
                reason=draw.choice([FAST_STEP, FAST_STEP, TRIGGERED, WITH_BATCH]),
                finished=int(draw.random() < 0.2),
            )
        )
    tokens = draw.choices([WORD, BOUNDARY, STOP, BOTH, 127, 128, 151_000, -1], k=batch)
    rules = StepRules(
        slow_start=draw.choice([1, 3]), min_gap=draw.choice([0, 3, MOST]),
        t_max=draw.choice([0, 5, MOST]), delay=draw.choice([0, 1, 3, 30]),
        budget=draw.choice([0, 1, 50, MOST]), recent=draw.choice([1, 20, MOST]),
        sliding=draw.random() < 0.5, synchronized=draw.random() < 0.2,
    )  # fmt: skip
    return tokens, states, rules


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_triton_advances_the_same(kernel_device, seed: int, dense: bool):
    pytest.importorskip("triton")
    tokens, states, rules = drawn(seed)
    wanted = Batch.of(tokens, states, dense=dense).advance(rules)
    got = Batch.of(tokens, states, dense=dense, device=kernel_device).advance(rules, "triton")
    for one, other in zip(got.results, wanted.results, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"token_B": torch.zeros(3, dtype=torch.int64)},
            r"^state must be \[B=3, X=9\], got \[2, 9\]$",
        ),
        (
            {"token_B": torch.zeros(2).int()},
            r"^token must be contiguous int64, got torch.int32 with",
        ),
        ({"bitmap_2X": torch.zeros(3, 4).int()}, r"^bitmap must be \[C=2, X\], got \[3, 4\]$"),
        ({"summary_2": torch.zeros(2)}, r"^summary must be int32, got torch.float32$"),
        (
            {"state_BX": torch.zeros(9, 2).int().T},
            r"^state must be contiguous, got strides \(1, 2\)$",
        ),
        ({"descriptor": blank(3)}, r"^descriptor must be of 2 requests, got 3$"),
        ({"dense": blank(1)}, r"^dense_descriptor must be of 2 requests, got 1$"),
    ],
)
def test_operands_that_do_not_fit_are_refused(backend: str, change: dict, message: str):
    if backend == "triton":
        pytest.importorskip("triton")
    batch = replace(Batch.of([WORD, WORD], [state(), state()]), **change)
    with pytest.raises(ValueError, match=message):
        batch.advance(RULES, backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delay": 31}, r"^delay must be in \[0, 30\], got 31$"),
        ({"delay": -1}, r"^delay must be in \[0, 30\], got -1$"),
        ({"t_max": 2**31}, r"^t_max must be in \[0, 2147483647\], got 2147483648$"),
    ],
)
def test_rules_that_do_not_fit_are_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        four(**change)
