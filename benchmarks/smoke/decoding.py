"""Stages 5 and 6: a decoding step of a large model, replayed and not, and what the host does for it."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.smoke.journal import Journal
from benchmarks.smoke.plan import Plan
from benchmarks.smoke.stand_in import Kept, kept_graphs
from benchmarks.smoke.timeline import profiled
from sfi_core.engine.maintenance import main_stream
from sfi_core.generation.sampling import Sampler
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.slow_fast import slow_fast
from sfi_core.measure.bench.architectures import random_config, random_model
from sfi_core.measure.bench.bench import release
from sfi_core.measure.bench.runs import Prompts
from sfi_core.measure.bench.settings import DecodeSettings, Point
from sfi_core.measure.kernel_bench.timing import clock_for, percentile
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import EngineOptions, Sampling

RATE = Fraction(1, 20)


@cache
def model(plan: Plan) -> Any:
    """Make the timed model, once."""
    config = random_config("qwen3-4b") if plan.large is None else AutoConfig.for_model(**plan.large)
    return random_model(config, plan.device, plan.torch_dtype)


class Steps:
    """Decoding under way, with given tokens; each request is slow once in twenty steps.

    Attributes:
        host_us: The host's time in each step: planning, describing, launching, noting.
        at: When the tokens of each step arrived, in seconds.
    """

    def __init__(self, decoder: Decoder, sampler: Sampler, token_SB: list[list[int]]) -> None:
        self._decoder, self._sampler = decoder, sampler
        device = decoder.ids_BT.device
        self._token_SB1 = torch.tensor(token_SB, device=device)[:, :, None]
        self.host_us: list[float] = []
        self.at: list[float] = []
        self._token_B = self._pick(decoder.prefill())

    def next(self) -> int:
        """Decode a step; return how many requests were slow in it."""
        began = time.perf_counter()
        logits_BV = self._decoder.step(self._token_B)
        self.host_us.append(1e6 * (time.perf_counter() - began))
        self._token_B = self._pick(logits_BV)
        return sum(state.slow for state in self._decoder.session.run.requests)

    @property
    def paths(self) -> Mapping[str, int]:
        """What really ran, and how often."""
        return self._decoder.session.run.meter.paths

    def _pick(self, logits_BV: torch.Tensor) -> list[int]:
        logits_BV.scatter_(1, self._token_SB1[len(self.at)], torch.finfo(logits_BV.dtype).max)
        token_B = self._sampler(logits_BV, [False] * len(logits_BV))
        self._decoder.run.record(token_B)
        self.at.append(time.perf_counter())
        return token_B


@contextmanager
def steps(plan: Plan, batch: int, count: int, engine: EngineOptions, *, ahead: bool) -> Iterator[tuple[Steps, Kept]]:
    """Begin to decode from a made-up cache."""
    engine = replace(engine, backend="triton")
    settings = DecodeSettings(
        contexts=(plan.context,), batches=(batch,), steps=count, slow_rate=RATE, engine=engine, config=SfiConfig(span=0)
    )
    network, device = model(plan), plan.device
    release(device)  # the pages of the last run, now that nothing holds them
    vocabulary = network.config.vocab_size
    prompts = Prompts.of(settings, Point(plan.context, batch), vocabulary, device)
    assert prompts.made_up is not None, "nothing is read"
    with (
        torch.inference_mode(),
        kept_graphs(plan) as graphs,
        main_stream(device, overlap=engine.overlap),
        slow_fast(network, None, settings.run_config, engine=engine) as session,
    ):
        decoder = Decoder(
            session=session, ids_BT=prompts.ids_BT, mask_BT=prompts.mask_BT,
            capacity=settings.capacity(plan.context), shared=prompts.made_up.shared(session),
        )  # fmt: skip
        sampler = Sampler(Sampling(), prompts.ids_BT, ahead=decoder.replays.ahead if ahead else None)
        yield Steps(decoder, sampler, prompts.token_SB), graphs


def replayed(journal: Journal, plan: Plan) -> None:
    """Capture the steps of each batch; time replays, and look into one of each kind."""
    if not plan.graphs:
        journal.note("replays", skipped="--no-graphs")
        return
    for batch in plan.batches:
        at = f"{plan.context} x {batch}"
        journal.trial(at, partial(_kinds, journal, plan, batch, at))


def _kinds(journal: Journal, plan: Plan, batch: int, at: str) -> None:
    met: set[int] = set()
    engine = EngineOptions(graphs=True)
    with steps(plan, batch, plan.steps, engine, ahead=False) as (decoding, graphs):
        for _ in range(plan.steps):
            slow = decoding.next()
            # what was just captured is replayed while the step's own description is still in place
            if len(graphs.captured) > len(met):
                met.add(len(graphs.captured))
                what = f"{at}, {slow} slow"
                journal.trial(what, partial(_timed, plan, graphs))
                journal.trial(f"{what}, profile", partial(profiled, _waited(plan, graphs), plan))
        if not graphs.captured:
            journal.note(at, failed="no step was recorded")


def _timed(plan: Plan, graphs: Kept) -> dict[str, Any]:
    clock = clock_for(plan.device, "torch")
    times_us = [*clock.time([graphs.captured[-1]] * plan.replays)]
    return {
        "capture_seconds": graphs.seconds[-1],
        "replay_ms": statistics.median(times_us) / 1e3,
        "p10_ms": percentile(times_us, 10) / 1e3,
        "p90_ms": percentile(times_us, 90) / 1e3,
    }


def _waited(plan: Plan, graphs: Kept) -> Callable[[], None]:
    def call() -> None:
        graphs.captured[-1]()
        if not plan.dry:
            torch.cuda.synchronize()

    return call


def hosted(journal: Journal, plan: Plan) -> None:
    """Time whole steps and the host's part of each, without graphs, with them, and launched ahead."""
    ways = {"no graphs": (False, False, plan.eager_steps)}
    if plan.graphs:
        ways["graphs"] = True, False, plan.steps
        ways["graphs, launched ahead"] = True, True, plan.steps
    for batch in plan.batches:
        for name, (graphs, ahead, count) in ways.items():
            engine = EngineOptions(graphs=graphs)
            call = partial(_host, plan, batch, count, engine, ahead=ahead)
            journal.trial(f"{plan.context} x {batch}, {name}", call)


def _host(plan: Plan, batch: int, count: int, engine: EngineOptions, *, ahead: bool) -> dict[str, Any]:
    with steps(plan, batch, count, engine, ahead=ahead) as (decoding, graphs):
        slow = [decoding.next() for _ in range(count)]
        paths = dict(decoding.paths)
    row: dict[str, Any] = {"steps": count, "captured": len(graphs.captured), "paths": paths}
    half = count // 2  # the first half warms up and captures
    times = list(zip(slow, decoding.host_us, decoding.at[:-1], decoding.at[1:], strict=True))[half:]
    for kind, wanted in (("fast", False), ("slow", True)):
        group = [step for step in times if bool(step[0]) == wanted]
        if group:
            row[f"{kind}_host_us"] = statistics.median(host for _, host, _, _ in group)
            row[f"{kind}_step_ms"] = statistics.median(1e3 * (b - a) for _, _, a, b in group)
    return row
