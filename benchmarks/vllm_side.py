"""An engine of vLLM in a process of its own, which does what its parent asks; `vllm_speed.py` starts it."""

import itertools
import multiprocessing
import os
import time
from dataclasses import dataclass
from typing import Any

PLAIN, SFI = "vllm", "sfi"
PIECE = 64  # blocks of random numbers, repeated through a cache
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Step:
    """One engine step.

    Attributes:
        seconds: How long it took.
        cpu_seconds: What the process computed in it, on all threads.
        slow: Whether any request was dense, under sfi.
    """

    seconds: float
    cpu_seconds: float
    slow: bool


@dataclass(frozen=True)
class Engine:
    """What a process needs to make its engine.

    Attributes:
        name: Which of the two.
        folder: The model's config.
        dtype: Its type.
        threads: Threads of a step.
        room: Most tokens of a request.
        batch: Most requests.
        piece: Tokens of a prompt that are read at once.
        settings: Those of sfi.
    """

    name: str
    folder: str
    dtype: str
    threads: int
    room: int
    batch: int
    piece: int
    settings: dict[str, Any]

    def make(self) -> Any:
        """Make the engine, in this process."""
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_CPU_KVCACHE_SPACE=str(self._gib()),
            VLLM_LOGGING_LEVEL="WARNING",
            VLLM_NO_USAGE_STATS="1",
        )
        from vllm import LLM  # noqa: PLC0415 - after what it reads of the environment

        own: dict[str, Any] = {}
        if self.name == SFI:
            own["kv_transfer_config"] = {
                "kv_connector": "SfiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": self.settings,
            }
        return LLM(
            model=self.folder, dtype=self.dtype, load_format="dummy", skip_tokenizer_init=True,
            max_model_len=self.room, max_num_seqs=self.batch, enforce_eager=True,
            max_num_batched_tokens=self.piece, disable_log_stats=True, **own,
        ).llm_engine  # fmt: skip

    def _gib(self) -> int:
        # 28 layers, 8 KV heads, keys and values of 128 numbers
        token = 28 * 8 * 2 * 128 * (4 if self.dtype == "float32" else 2)
        return 1 + self.batch * self.room * token // (1 << 30)


class Requests:
    """The requests of one engine."""

    def __init__(self, engine: Engine) -> None:
        """Make the engine."""
        import torch  # noqa: PLC0415 - the parent needs none

        self.engine, self.llm = engine, engine.make()
        torch.set_num_threads(engine.threads)
        self.names: list[str] = []

    def fill(self, prompts: list[list[int]]) -> None:
        """Let vLLM take random keys and values for those of some prompts: it reads them without a model."""
        runner = self.llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        for cache_PHNX in runner.kv_caches:
            drawn = cache_PHNX[:PIECE].normal_()
            for start in range(PIECE, len(cache_PHNX), PIECE):
                rest = cache_PHNX[start : start + PIECE]
                rest.copy_(drawn[: len(rest)])
        if self.engine.name == SFI:
            note_norms()
        hidden = runner.model_config.get_hidden_size()
        runner.model.forward = lambda input_ids, *_, **__: cache_PHNX.new_zeros(
            len(input_ids), hidden
        )
        self.open(prompts, 1, {})
        del runner.model.forward

    def open(
        self, prompts: list[list[int]], tokens: int, extra: dict[str, Any]
    ) -> dict[str, float]:
        """Read new prompts to their end, in place of the old ones."""
        from vllm import SamplingParams  # noqa: PLC0415 - see `Engine.make`

        self.close()
        wanted = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=tokens,
            detokenize=False,
            extra_args=extra,
        )
        self.names = [f"{next(NUMBERS)}" for _ in prompts]
        began, cpu, missing = time.perf_counter(), time.process_time(), set(self.names)
        for name, ids in zip(self.names, prompts, strict=True):
            self.llm.add_request(name, {"prompt_token_ids": ids}, wanted)
        while missing:
            missing -= {one.request_id for one in self.llm.step() if one.outputs[0].token_ids}
        return {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu,
        }

    def decode(self, steps: int) -> list[Step]:
        """Take engine steps."""
        return [self._step() for _ in range(steps)]

    def profile(self, steps: int) -> list[str]:
        """Say where steps' time goes: the operations that take most of it, for fast and slow steps."""
        from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

        shown = []
        for _ in range(steps):
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                step = self._step()
            table = seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=14)
            shown.append(f"{self.engine.name}, {'slow' if step.slow else 'fast'}: {step}\n{table}")
        return shown

    def close(self) -> None:
        """Drop the requests."""
        if self.names:
            self.llm.abort_request(self.names)
            self.names = []

    def _step(self) -> Step:
        began, cpu = time.perf_counter(), time.process_time()
        self.llm.step()
        taken, cpu = time.perf_counter() - began, time.process_time() - cpu
        return Step(taken, cpu, self._slow())

    def _slow(self) -> bool:
        if self.engine.name == PLAIN:
            return False
        scheduler = self.llm.engine_core.engine_core.scheduler
        tracked = scheduler.get_kv_connector().planner.tracked
        return any(one.slot >= 0 and one.state.slow for one in tracked.values())


def note_norms() -> None:
    """Let sfi know the norms of the keys that the cache was filled with."""
    from sfi_core.hosts.vllm.serving import engine_of_process  # noqa: PLC0415 - see `Engine.make`

    found = engine_of_process()
    assert found is not None, "sfi is configured"
    for pages in found.store.layers.values():
        for start in range(0, len(pages.norm_PHN), PIECE):
            own = slice(start, start + PIECE)
            pages.norm_PHN[own] = pages.key_PHND[own].float().norm(dim=-1)


def serve(engine: Engine, pipe: Any) -> None:
    """Do what the parent asks, in a process of its own."""
    requests = Requests(engine)
    pipe.send(engine.name)
    while True:
        verb, *arguments = pipe.recv()
        if verb == "end":
            return
        pipe.send(getattr(requests, verb)(*arguments))


class Side:
    """The parent's end of an engine."""

    def __init__(self, engine: Engine) -> None:
        """Start its process and wait until it is there."""
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(engine, other), daemon=True)
        self._process.start()
        other.close()
        self._pipe.recv()

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Let it do something; wait for the answer."""
        self._pipe.send((verb, *arguments))
        return self._pipe.recv()

    def end(self) -> None:
        """End its process."""
        self._pipe.send(("end",))
        self._process.join()
