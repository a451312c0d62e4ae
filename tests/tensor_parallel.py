"""Runs that `tests/core/distributed/test_tensor_parallel.py` makes in one process and on two ranks.

As a script, it is both ranks: `python tests/tensor_parallel.py works|others|hangs FOLDER` starts them as forks of
one process, which has imported all they need. Ranks that work replay steps and record a trace too, by the command line;
then the first one dies. Others run the other cases.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.train_bundled import build_tokenizer
from sfi_cli import app
from sfi_core import EngineOptions, Sampling, SfiConfig, generate, load, slow_fast
from sfi_core.distributed.ranks import ALONE, Ranks, ranks_of
from sfi_core.engine.graphs.buffers import StepBuffers
from sfi_core.engine.run import Run
from sfi_core.errors import SfiError
from sfi_core.generation.sampling import Sampler
from tests.architectures import BY_LABEL, padded, prompts
from tests.fake_graph import FakeRecorder, use_tensors
from tests.fakes import Listener

MODELS = ("llama", "qwen3-moe", "gemma-3", "qwen3.5")
MORE_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
LENGTHS, STEPS = (90, 31, 60), 10
WAIT = 240  # seconds until a rank counts as stuck, on a busy machine
CONFIG = SfiConfig(
    sink=2, recent=8, budget=12, t_max=4, span=2, trigger_token_ids=tuple(range(0, 300, 5)), window_prefill=4
)
PAPER = SfiConfig.preset("paper").replace(
    sink=2, recent=8, budget=12, t_max=4, trigger_token_ids=tuple(range(0, 300, 5))
)
TEXT = "Belora hid a red lantern. Tavo keeps a green kite. " * 8 + "Belora hid a"
COMMANDS = SfiConfig(recent=8, budget=12, t_max=2)


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    config: SfiConfig = CONFIG
    options: dict[str, Any] = field(default_factory=dict)
    hosted: bool = False  # by `model.generate` under `slow_fast`
    lengths: Sequence[int] = LENGTHS


LOSSLESS = EngineOptions(lossless=True)
CASES = {
    "llama default": Case("llama"),
    "llama paper": Case("llama", PAPER),
    "hosted sampled": Case("llama", options={"do_sample": True, "temperature": 1.5}, hosted=True),
    **{f"{label} default": Case(label) for label in MODELS[1:]},
    "bundled": Case("", CONFIG.replace(budget=24, t_max=3)),
    "sampled": Case("llama", options={"sampling": Sampling(temperature=1.5), "seed": 3}),
    "chunks": Case("llama", options={"engine": EngineOptions(prefill_chunk=16)}),
    "lossless": Case("llama", options={"engine": LOSSLESS}),
    "lossless sampled": Case(
        "qwen3-moe", CONFIG, {"engine": LOSSLESS, "sampling": Sampling(temperature=1.5), "seed": 3}
    ),
    "lossless codescan": Case("llama", options={"engine": LOSSLESS, "policy": "codescan"}),
    "hosted": Case("qwen3-moe", hosted=True),
    **{policy: Case("llama", options={"policy": policy}) for policy in ("random-k", "quest")},
}
WORKS = [*CASES][:3]
GRAPHED = ("sfi", "codescan", "full-kv", "hosted")


def save_models(folder: Path) -> None:
    more = {name: {**MORE_HEADS} for name in MODELS}
    more["odd"] = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    for label, settings in more.items():
        shape = BY_LABEL["llama" if label == "odd" else label]
        model = replace(shape, settings={**shape.settings, **settings}).build()
        _save(model, folder / label)
    for label in ("gpt-2", "olmo-2"):
        _save(BY_LABEL[label].build(), folder / label)
    twin = AutoModelForCausalLM.from_pretrained(folder / "llama")
    with torch.no_grad():
        twin.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    _save(twin, folder / "llama-trained-on")


def _save(model, folder: Path) -> None:
    model.save_pretrained(folder)
    build_tokenizer(512).save_pretrained(folder)


def complete(case: Case, model) -> dict:
    """Run a case; return its tokens, its steps and the positions of every selection by KV head."""
    seen = Listener()
    rows = prompts(*case.lengths)
    if case.hosted:
        torch.manual_seed(7 + int(os.environ.get("RANK", "0")))  # the first rank's counts
        options = dict(case.options)
        with slow_fast(model, None, case.config, observers=[seen], engine=options.pop("engine", None)) as session:
            model.generate(**padded(rows), max_new_tokens=STEPS, **options)
            report = session.report
    else:
        options = {"max_new_tokens": STEPS, "stop_token_ids": (), **case.options}
        result = generate(model, None, rows, case.config, observers=[seen], **options)
        report = result.report
    return {
        "tokens": [request.token_ids for request in report.requests],
        "slow_at": [request.slow_at for request in report.requests],
        "steps": [(e.step, e.request, e.position, e.reason, e.attended_tokens) for e in seen.steps],
        "paths": report.paths,
        "eager": [report.not_compiled, report.not_replayed],
        "selected": {
            f"request {event.request} step {event.step} layer {event.layer}": event.index_HK.tolist()
            for event in seen.selections
        },
    }


def some_cases(folder: Path, names: Sequence[str]) -> dict:
    """Run cases, each model loaded once."""
    models: dict[str, Any] = {}
    completions = {}
    for name in names:
        case = CASES[name]
        if case.model not in models:
            source = str(folder / case.model) if case.model else None
            models[case.model] = load(source, device="cpu")[0]
        completions[name] = complete(case, models[case.model])
    return completions


@contextmanager
def taped() -> Iterator[pytest.MonkeyPatch]:
    """Let a tape stand for graphs."""
    with pytest.MonkeyPatch.context() as patch:
        FakeRecorder().install(patch)
        use_tensors(patch)
        yield patch


def replayed(model, policy: str, *, graphs: bool | None) -> dict:
    """Run on the backend that has graphs, with or without them."""
    engine = EngineOptions(backend="triton", graphs=graphs)
    if policy == "hosted":
        return complete(Case("llama", options={"engine": engine}, hosted=True), model)
    options = {"policy": policy, "engine": engine, "page_size": 16}
    if policy == "codescan":  # with the kernels that choose
        return complete(Case("llama", options={**options, "max_new_tokens": 5}, lengths=(20, 9)), model)
    return complete(Case("llama", options=options), model)


def every_replay(model, rank: int) -> dict[str, list[dict]]:
    """Run policies without graphs and with them, and where the last rank's model waits for the device."""
    with taped():
        replays = {policy: [replayed(model, policy, graphs=graphs) for graphs in (False, True)] for policy in GRAPHED}
        with waiting(model, rank):
            replays["given up"] = [replays["sfi"][0], replayed(model, "sfi", graphs=None)]
    return replays


def waiting(model, rank: int):
    """Let the last rank look at a tensor in every pass; returns the hook, which is a context."""

    def look(_, args) -> None:
        if rank:
            args[0].sum().item()

    return model.model.norm.register_forward_pre_hook(look)


def every_refusal(folder: Path) -> dict[str, str]:
    """Make the mistakes that all ranks must report alike; return the errors."""
    rank = int(os.environ["RANK"])
    model, _ = load(str(folder / "llama"), device="cpu")

    def run(rows: Sequence[Sequence[int]] = ((1, 2, 3),), config: SfiConfig = CONFIG, **options) -> None:
        generate(model, None, rows, config, stop_token_ids=(), **{"max_new_tokens": 4, **options})

    def broken() -> None:
        # NaN on the last rank only: nothing but the ranks' agreement tells the first one
        spoil = model.lm_head.register_forward_hook(lambda *call: call[2] * torch.nan if rank else None)
        try:
            result = generate(model, None, [[1, 2, 3]], CONFIG, max_new_tokens=4)
        finally:
            spoil.remove()
        if result.error is not None:
            raise result.error

    def hosted() -> None:
        with slow_fast(model, None, CONFIG):
            model.generate(torch.tensor([[1, 2, 3 + rank]]), max_new_tokens=4)

    def kinds() -> None:
        kind = StepBuffers.kind.fget
        with taped() as patch:
            if rank:
                patch.setattr(StepBuffers, "kind", property(lambda step: kind(step)._replace(chooses=True)))
            run(engine=EngineOptions(backend="triton"))

    def recording() -> None:
        with taped(), waiting(model, rank):
            run(engine=EngineOptions(backend="triton", graphs=True))

    mistakes: dict[str, Callable[[], Any]] = {
        "checkpoints": lambda: load(str(folder / ("llama-trained-on" if rank else "llama")), device="cpu"),
        "missing": lambda: load(str(folder / ("nowhere" if rank else "llama")), device="cpu"),
        "heads": lambda: load(str(folder / "odd"), device="cpu"),
        "no plan": lambda: load(str(folder / "gpt-2"), device="cpu"),
        "all heads": lambda: load(str(folder / "olmo-2"), device="cpu"),
        "device": lambda: load(str(folder / "llama"), device="cuda:0"),
        "prompts": lambda: run([[1, 2, 3 + rank]]),
        "config": lambda: run(config=CONFIG.replace(budget=12 + rank)),
        "seed": lambda: run(seed=rank),
        "length": lambda: run(max_new_tokens=4 + rank),
        "graphs": lambda: run(engine=EngineOptions(graphs=True)),
        "kinds": kinds,
        "recording": recording,
        "hosted": hosted,
        "hosted tokens": lambda: ranks_of(model).same_tokens(torch.tensor([5 + rank])),
        "numerics": broken,
    }
    refusals = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            refusals[name] = "nothing"
        except SfiError as error:
            refusals[name] = f"{type(error).__name__}: {error}"
    run()  # after all of that, the ranks still work together
    return refusals


def picked(rank: int, ranks: Ranks = ALONE) -> list[int]:
    """Pick tokens of logits that each rank has made up by itself."""
    logits_XV = torch.randn(4, 50, generator=torch.Generator().manual_seed(rank))
    sampler = Sampler(Sampling(temperature=1.0), torch.zeros(2, 3).long(), ranks)
    return sampler.read(sampler.draw(logits_XV, [0, 0, 1, 1], [0, 1, 0, 1], [()] * 4))


def lose_a_rank(how: str) -> None:
    """Run `sfi generate` on ranks of which one stops while it decodes: the first dies, or the last hangs."""
    begin = Run.begin_decode

    def stop(run: Run) -> None:
        begin(run)
        if run.requests[0].step == 3:
            if how == "dies" and os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs" and os.environ["RANK"] == "1":
                time.sleep(600)

    Run.begin_decode = stop  # type: ignore[method-assign]
    sfi("generate", "-n", "8")


def sfi(*arguments: str) -> None:
    """Complete `TEXT` by a command, as the console's script does; go on where it succeeds."""
    chosen = (f"--{name.replace('_', '-')}={getattr(COMMANDS, name)}" for name in ("recent", "budget", "t_max"))
    sys.argv = ["sfi", *arguments, TEXT, *chosen, "--device", "cpu"]
    try:
        app.main()
    except SystemExit as ended:
        if ended.code:
            raise


def be_rank(rank: int, mode: str, folder: Path) -> None:
    """Be one of two ranks under torchrun; what it says goes to files."""
    signal.alarm(WAIT)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
    if mode == "hangs":
        lose_a_rank(mode)
    results = {"cases": some_cases(folder, WORKS if mode == "works" else [*CASES][len(WORKS) :])}
    if mode == "works":
        results["refusals"] = every_refusal(folder)
        model, _ = load(str(folder / "llama"), device="cpu")
        results |= {"picked": picked(rank, ranks_of(model)), "replays": every_replay(model, rank)}
    (folder / f"{mode}-{rank}.json").write_text(json.dumps(results))
    if mode == "others":
        return
    sfi("trace", "record", "-o", str(folder / "run"), "--json", "-n", "6", "--audit", "5", "--quiet")
    lose_a_rank("dies")


def main() -> None:
    """Start both ranks and print how each ended; one that hangs is killed when the other has ended."""
    mode, folder = sys.argv[1], Path(sys.argv[2])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=be_rank, args=(rank, mode, folder)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    ranks[0].join()
    if mode == "hangs":
        ranks[1].kill()
    ranks[1].join()
    sys.stdout.write(json.dumps([rank.exitcode for rank in ranks]))


if __name__ == "__main__":
    main()
