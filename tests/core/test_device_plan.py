"""Planning on the device: the same descriptors, states and reasons as the host's, step by step."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sfi_core import SfiConfig, slow_fast
from sfi_core.describe import describe_pass
from sfi_core.device_plan import DevicePlan
from sfi_core.engine_options import EngineOptions
from sfi_core.events import BeginStepEvent, StepEvent
from sfi_core.kv_cache import KVCache
from sfi_core.observer import NullObserver
from sfi_core.policies import POLICIES, policy_class
from sfi_core.policies.base import StepContext, StepPlan
from sfi_core.run import Run
from sfi_core.trigger import Trigger
from sfi_kernels.advance.state import FASTS, FINISHED, MOST, REASON, SLOWS
from sfi_kernels.advance.state import PACKED as PACKED_TOKENS
from sfi_kernels.decode_attention import slots
from sfi_kernels.split_plan import split_plan
from sfi_kernels.step_descriptor import FIRST, LISTS, SPLITS, list_room
from tests.architectures import padded

VOCABULARY = 60
CPU = torch.device("cpu")


@dataclass
class Script:
    """A run without a model: the tokens are drawn, and a slow step leaves as many packed ones as it must."""

    run: Run
    draw: random.Random
    quiet: float  # the share of tokens that are a word, in no set

    def begin(self, prompts: list[int]) -> None:
        self.run.layers.update((0, 1))
        self.run.begin_prefill(prompts, final=True)
        self._select()

    def step(self) -> torch.Tensor:
        """Finish the step under way; return its tokens as the device gets them."""
        token_B = [
            1 if self.draw.random() < self.quiet else self.draw.randrange(VOCABULARY)
            for _ in self.run.requests
        ]
        self.run.record(token_B)
        return torch.tensor(token_B)

    def begin_decode(self) -> None:
        self.run.begin_decode()
        self._select()

    def _select(self) -> None:
        """Do to the states what the layers do, last of all `LayerStep.apply`."""
        config, first = self.run.policy.config, not self.run.forward.decode
        dense = [layer in config.dense_layers for layer in self.run.layers]
        selects = any(map(self.run.policy.selects_in, self.run.layers))
        for state, count in zip(self.run.requests, self.run.forward.count, strict=True):
            if count and state.slow and (selects or (first and not all(dense))):
                sink = state.sink(config.sink)
                chosen = min(config.budget, state.recent_start - sink) if selects else 0
                state.packed_tokens = sink + chosen


def script(
    config: SfiConfig,
    batch: int,
    *,
    seed: int = 0,
    policy: str = "sfi",
    triggers: tuple[int, ...] = (7, 31, 32, 59),
    stops: tuple[int, ...] = (),
    quiet: float = 0.9,
    backend: str = "torch",
    synchronized: bool = False,
) -> Script:
    trigger = Trigger(frozenset(triggers), config)
    run = Run(
        policy_class(policy)(config, trigger, (0, 1)),
        NullObserver(),
        KVCache(batch, 4096, 64, backend),
        frozenset(stops),
        engine=EngineOptions(synchronized=synchronized),
    )
    made = Script(run, random.Random(seed), quiet)
    made.begin([made.draw.randint(1, 40) for _ in range(batch)])
    return made


class Buffers:
    """The device's descriptors, which begin as those of another step, all that is to be written spoiled."""

    def __init__(self, run: Run) -> None:
        begun = replace(run.forward, decode=True, count=[1] * run.cache.batch)
        self.step, self.dense = describe_pass(begun, run.requests, run.policy, run.cache, CPU)
        for descriptor in (self.step, self.dense):
            if descriptor is not None:
                descriptor.buffer[: LISTS * list_room(descriptor.batch)] = -7
                descriptor.table_BX[:, :FIRST] = -7
                descriptor.table_BX[:, FIRST : SPLITS + 1] = 0
                descriptor.work_XI[:] = -1


def follow(made: Script, steps: int, plan: DevicePlan | None = None) -> Counter[str]:
    """Decode, on the host and on the device; see that all is the same, and return the reasons met."""
    run, plan = made.run, plan or DevicePlan(made.run)
    buffers, met = Buffers(run), Counter()
    for _ in range(steps):
        plan.step(made.step(), buffers.step, buffers.dense)
        if run.done:
            assert plan.summary_2.tolist() == [0, 0]
            met["done"] += 1
            break
        made.begin_decode()
        for got, wanted in zip(
            (buffers.step, buffers.dense), (run.descriptor, run.dense_descriptor), strict=True
        ):
            if wanted is not None and run.cache.backend == "triton":
                split_plan.triton(got, 1, slots(CPU))
            assert wanted is None or torch.equal(got.buffer, wanted.buffer)
        slow, fast = run.descriptor.slow, run.descriptor.fast
        assert (plan.summary_2[SLOWS], plan.summary_2[FASTS]) == (len(slow), len(fast))
        for state, code in zip(run.requests, plan.state_BX[:, REASON].tolist(), strict=True):
            assert plan.reasons[code] == state.reason
            met["finished" if state.finished else state.reason] += 1
    return met


def settings(draw: random.Random) -> SfiConfig:
    """Draw what plans a step, small enough for everything to happen."""
    return SfiConfig(
        sink=draw.choice([0, 1, 4, 30]),
        recent=draw.choice([1, 5, 16]),
        recent_mode=draw.choice(["anchored", "sliding"]),
        budget=draw.choice([1, 8, 50, 2048]),
        t_max=draw.choice([0, 1, 7, 20, 10**12]),
        min_gap=draw.choice([0, 0, 1, 2, 5, 10**12]),
        trigger_delay=draw.choice([0, 0, 1, 2, 3, 30]),
        slow_start=draw.choice([1, 2, 3]),
        stride=draw.choice([1, 2, 9]),
        dense_layers=draw.choice([(), (), (0,), (1,), (0, 1)]),
        trigger_policy=draw.choice(
            ["boundary", "boundary", "boundary", "t-max", "stride", "always", "never"]
        ),
    )


@pytest.mark.parametrize("seed", range(60))
def test_every_step_is_described_as_the_host_does(seed: int):
    """Also with no trigger at all, with tokens that are both, and with one slow request for all."""
    draw = random.Random(seed)
    made = script(
        settings(draw),
        draw.randint(1, 9),
        seed=seed,
        triggers=draw.choice([(), (7, 31, 32, 59), tuple(range(VOCABULARY))]),
        stops=draw.choice([(), (), (59,), (3, 7, 40)]),
        quiet=draw.choice([0.5, 0.9, 0.98]),
        synchronized=draw.random() < 0.2,
    )
    follow(made, 200)


def test_all_of_the_rules_are_met_by_those_runs():
    met = Counter()
    for seed in range(6):
        config = SfiConfig(t_max=7, slow_start=3, recent=5, budget=8)
        options = {"stops": (4, 59), "quiet": 0.8, "synchronized": seed % 2 > 0}
        met += follow(script(config, 9, seed=seed, **options), 400)
    assert set(met) == {"", "first", "trigger", "t_max", "batch", "finished", "done"}
    assert met.pop("done") > 0
    assert min(met.values()) > 50


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_is_planned_as_the_host_does_or_left_to_it(policy: str):
    config = SfiConfig(t_max=9, recent=5, budget=8)
    made = script(config, 3, policy=policy, stops=(59,))
    supported = {"full-kv", "sfi", "streaming-llm", "snapkv", "prior-only", "random-k"}
    assert DevicePlan.supports(made.run.policy) == (policy in supported)
    if policy in supported:
        follow(made, 60)


@pytest.mark.parametrize("trigger_policy", ["cosine", "entropy", "random"])
def test_triggers_that_look_at_more_than_tokens_are_left_to_the_host(trigger_policy: str):
    config = SfiConfig(trigger_policy=trigger_policy)
    assert not DevicePlan.supports(policy_class("sfi")(config, Trigger(frozenset(), config)))


def test_a_delay_beyond_what_the_words_remember_is_left_to_the_host():
    for delay, fits in ((30, True), (31, False)):
        config = SfiConfig(trigger_delay=delay)
        policy = policy_class("sfi")(config, Trigger(frozenset(), config))
        assert DevicePlan.supports(policy) == fits


def test_a_plan_of_a_policy_s_own_is_left_to_the_host():
    class Impatient(policy_class("sfi")):
        def plan(self, context: StepContext) -> StepPlan:
            return StepPlan.by_reason(["now"] * len(context.requests))

    class Peeking(policy_class("sfi")):
        selects_before = True

    config = SfiConfig()
    for kind in (Impatient, Peeking):
        assert not DevicePlan.supports(kind(config, Trigger(frozenset(), config)))


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 40])
def test_a_run_can_be_taken_over_at_any_step(steps: int, noted: bool):
    """Whether the tokens of the step under way have been noted or not."""
    config = SfiConfig(t_max=7, trigger_delay=2, recent=5, budget=8)
    made = script(config, 5, quiet=0.5)
    for _ in range(steps):
        made.step()
        made.begin_decode()
    early = DevicePlan(made.run)
    token_B = made.step()
    plan = DevicePlan(made.run) if noted else early
    plan.step(token_B, Buffers(made.run).step)
    made.begin_decode()
    assert follow(made, 40, plan)["trigger"] > 3


def test_the_words_are_those_of_a_plan_made_anew():
    """All but the packed tokens, which a slow step leaves when it ends; a finished request has only ended."""
    config = SfiConfig(t_max=7, trigger_delay=3, recent=5, budget=8)
    made = script(config, 6, stops=(59,), quiet=0.5)
    plan, met = DevicePlan(made.run), Counter()
    for _ in range(80):
        met += follow(made, 1, plan)
        running, fresh = plan.state_BX.tolist(), DevicePlan(made.run).state_BX.tolist()
        for words, anew in zip(running, fresh, strict=True):
            words[PACKED_TOKENS] = anew[PACKED_TOKENS]
            assert anew[FINISHED] if words[FINISHED] else words == anew
    assert {"", "trigger", "finished"} < set(met)
    assert "done" not in met


def test_settings_beyond_32_bits_are_as_large_as_can_be():
    """A setting of that size is never reached."""
    huge = dict.fromkeys(("t_max", "min_gap", "slow_start", "budget", "recent"), 10**12)
    made = script(SfiConfig(**huge), 1)
    rules = DevicePlan(made.run).rules
    assert {getattr(rules, name) for name in huge} == {MOST}
    assert follow(made, 5) == {"first": 5}


def test_another_request_may_take_a_row():
    """The place of the words stays, as a captured graph needs it."""
    config = SfiConfig(t_max=7, recent=5, budget=8)
    made, other = script(config, 3, quiet=0.5), script(config, 3, seed=1)
    plan = DevicePlan(made.run)
    addresses = plan.state_BX.data_ptr(), plan.summary_2.data_ptr()
    follow(made, 20, plan)
    follow(other, 33)
    made.run.requests[1] = other.run.requests[2]
    plan.load(1, made.run.requests[1])
    assert follow(made, 40, plan)["trigger"] > 0
    assert (plan.state_BX.data_ptr(), plan.summary_2.data_ptr()) == addresses


def test_a_finished_request_makes_no_other_slow():
    """Its last token is in T_trig, where it stays."""
    config = SfiConfig(t_max=10**6, trigger_delay=0, slow_start=1)
    made = script(config, 2, triggers=(7,), stops=(7,), synchronized=True)
    plan, buffers = DevicePlan(made.run), Buffers(made.run)
    for token_B in ([7, 1], [1, 1], [1, 1]):
        made.run.record(token_B)
        plan.step(torch.tensor(token_B), buffers.step)
        made.begin_decode()
        assert torch.equal(buffers.step.buffer, made.run.descriptor.buffer)
        assert made.run.descriptor.fast == (1,)


def test_the_kernels_plan_the_work_as_well():
    """Both launches of a step, and the whole buffer."""
    pytest.importorskip("triton")
    config = SfiConfig(t_max=2, recent=5, budget=8, dense_layers=(0,))
    met = follow(script(config, 5, stops=(59,), quiet=0.5, backend="triton"), 5)
    assert {"", "first", "t_max"} <= set(met)


class Compared(NullObserver):
    """Steps a device plan beside a model's run, and compares whenever a step has begun."""

    def __init__(self) -> None:
        self.session: Any = None
        self.plan: DevicePlan | None = None
        self.steps: list[int] = []

    def on_step(self, event: StepEvent) -> None:
        run = self.session.run
        if event.request == len(run.requests) - 1:  # all tokens of the step are noted
            self.plan = self.plan or DevicePlan(run)
            self.made = Buffers(run)
            token_B = torch.tensor([state.tokens[-1] for state in run.requests])
            self.plan.step(token_B, self.made.step, self.made.dense)

    def on_begin_step(self, event: BeginStepEvent) -> None:
        if event.step > 0:
            run = self.session.run
            assert torch.equal(self.made.step.buffer, run.descriptor.buffer)
            if run.dense_descriptor is not None:
                assert torch.equal(self.made.dense.buffer, run.dense_descriptor.buffer)
            self.steps.append(len(event.slow))


@pytest.mark.parametrize("policy", ["sfi", "full-kv", "streaming-llm", "snapkv", "random-k"])
@pytest.mark.parametrize("dense_layers", [(), (1,), (0, 1)])
def test_a_model_leaves_the_packed_tokens_that_the_device_counts(
    tiny_model, policy: str, dense_layers: tuple[int, ...]
):
    config = SfiConfig(
        sink=2, recent=4, budget=6, t_max=4, span=0, window_prefill=2, dense_layers=dense_layers,
        trigger_token_ids=tuple(range(0, 96, 7)),
    )  # fmt: skip
    observer, rows = Compared(), [[*range(5, 25)], [*range(40, 47)], [3]]
    with slow_fast(tiny_model, None, config, policy=policy, observers=[observer]) as session:
        observer.session = session
        tiny_model.generate(**padded(rows), max_new_tokens=20, eos_token_id=None, pad_token_id=0)
    assert len(observer.steps) == 19
    if policy in ("sfi", "random-k"):
        assert {0, 3} < set(observer.steps)
