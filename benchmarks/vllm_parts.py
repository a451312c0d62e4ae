"""The parts of vllm.sh: sfi in vLLM beside vLLM alone, each engine in a process of its own.

    python benchmarks/vllm_parts.py speed-sfi --model M --folder WORK --output RESULTS --seconds 180

Decoding is what several new tokens take beyond one: both runs find the prompt in vLLM's prefix cache. A
longer context's prompt begins with a shorter one's, so that only the rest is read. Every `STRIDE`-th step of
sfi is slow: random tokens have no sentences. It has not run on a GPU.

On a CPU, plain vLLM, sfi and codescan in turns, a thread each, over some layers of Qwen3-0.6B's sizes and as large a
part of its vocabulary; all prompts are read before the first turn of a point, and each engine's requests wait while the
others have theirs:

    python benchmarks/vllm_parts.py turns --model 14 --cache 4 --folder WORK --output RESULTS --seconds 2400
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "traces")]

ENGINES = ("vllm", "sfi")
STRIDE, STEPS, SPARE = 20, 100, 64
# in turns: of a CPU; sfi's budget is that of the policies, and its recent tokens
TURNS, TURN_CONTEXTS, TURN_BATCHES = ("vllm", "sfi", "codescan"), (4096, 16384, 32768), (1, 4)
TURN_STEPS, TURN_COUNT = 10, 8  # short turns: a virtual machine's speed changes within seconds
TURN_SETTINGS = {"budget": 1024, "recent": 128}
BATCHES, CONTEXTS = (1, 8, 32), (8192, 32768, 131072)
EQUAL = (3, 17, 64, 500, 1900)  # prompts of the equality part, ragged
TIE = 0.25  # nats: two tokens this close may change places when kernels round differently


def main(words: Sequence[str] | None = None) -> int:
    """Run a part; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [f"{kind}-{engine}" for kind in ("equality", "speed") for engine in ENGINES]
    parser.add_argument("part", choices=["versions", *kinds, "table", "turns", *(f"turn-{engine}" for engine in TURNS)])
    parser.add_argument("--model", required=True, help="empty for the bundled checkpoint; of turns, how many layers")
    parser.add_argument("--folder", type=Path, required=True, help="where parts leave their numbers")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--sfi", default="{}", help="more settings of sfi, as JSON")
    parser.add_argument("--cache", default="4", help="of turns: GiB of each engine's cache")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, tiny")
    asked = parser.parse_args(words)
    asked.ends = time.monotonic() + asked.seconds
    if asked.part == "versions":
        return versions(dry=asked.dry_run)
    if asked.part == "table":
        return table(asked)
    if asked.part == "turns":
        return turns(asked)
    kind, engine = asked.part.split("-")
    if kind == "turn":
        return turn(asked, engine)
    numbers = {"equality": equality, "speed": speed}[kind](asked, engine)
    (asked.folder / f"{asked.part}.json").write_text(json.dumps(numbers))
    return 0


def versions(*, dry: bool) -> int:
    """Print what is installed; 1 where a run would fail."""
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - `--help` needs none

    from sfi_core.hosts.vllm import VERSIONS  # noqa: PLC0415 - after sys.path

    release, connectors = installed(), [p.name for p in entry_points(group="vllm.general_plugins")]
    print(f"vLLM {release}, torch {version('torch')}, {machine_name()}")
    wrong = [
        f"vLLM must be {VERSIONS}, got {release}" if release is None or release not in SpecifierSet(VERSIONS) else "",
        "" if "sfi" in connectors else "sfi must be installed where vLLM is: pip install .",
        "" if dry or machine_name() != "cpu" else "torch must see a CUDA device; see --dry-run",
    ]
    for line in filter(None, wrong):
        print(f"error: {line}", file=sys.stderr)
    return int(any(wrong))


def make(asked: argparse.Namespace, engine: str, extra: dict[str, Any], **options: Any) -> Any:
    """Make an engine in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if asked.dry_run:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM  # noqa: PLC0415 - after what it reads of the environment

    from sfi_core.hosts.vllm import ATTENTION, CONNECTOR  # noqa: PLC0415 - after sys.path
    from sfi_core.models.load import BUNDLED  # noqa: PLC0415 - after sys.path

    config: dict[str, Any] = {"dtype": "float32", "enforce_eager": True} if asked.dry_run else {}
    if engine != "vllm":
        settings = {"policy": engine, "trigger_policy": "stride", "stride": STRIDE, **json.loads(asked.sfi), **extra}
        config["kv_transfer_config"] = {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
        if machine_name() != "cpu":
            config["attention_config"] = ATTENTION
    return LLM(
        model=asked.model or str(BUNDLED), load_format=asked.load_format, skip_tokenizer_init=True, **config, **options
    )


def generate(llm: Any, prompts: list[list[int]], tokens: int, **options: Any) -> tuple[list[Any], float]:
    """Generate greedily; return the outputs and the seconds."""
    from vllm import SamplingParams  # noqa: PLC0415 - see `make`

    wanted = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
    began = time.perf_counter()
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], wanted, use_tqdm=False)
    return done, time.perf_counter() - began


def prompts_of(llm: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Return random prompts; the first tokens of a longer one are those of a shorter one at its place."""
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    draws = [random.Random(place) for place in range(len(lengths))]
    return [[draw.randrange(vocab // 2) for _ in range(length)] for draw, length in zip(draws, lengths, strict=True)]


def equality(asked: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Generate with a budget above every context: the tokens, and the two likeliest of each step."""
    lengths, room = (EQUAL[:4], 1024) if asked.dry_run else (EQUAL, 4096)
    llm = make(asked, engine, {"budget": room}, max_model_len=room, max_num_seqs=8)
    done, _ = generate(llm, prompts_of(llm, lengths), 8 if asked.dry_run else 48, logprobs=2)
    outputs = [request.outputs[0] for request in done]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [{str(token): candidate.logprob for token, candidate in step.items()} for step in output.logprobs]
            for output in outputs
        ],
    }


def speed(asked: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Measure tokens/s of decoding at every point that fits into the cache and the time."""
    batches: Sequence[int] = (1, 2) if asked.dry_run else BATCHES
    contexts: Sequence[int] = (64, 128) if asked.dry_run else CONTEXTS
    steps = 8 if asked.dry_run else STEPS
    room = contexts[-1] + steps + SPARE
    tiny = {"budget": 16, "recent": 8, "sink": 4} if asked.dry_run else {}
    fits = {} if asked.dry_run else {"hf_overrides": {"max_position_embeddings": room}}
    llm = make(asked, engine, tiny, max_model_len=room, max_num_seqs=batches[-1], **fits)
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    cache = llm.llm_engine.vllm_config.cache_config
    held = cache.num_gpu_blocks * cache.block_size
    for context, batch in points(contexts, batches):
        point = {"context": context, "batch": batch}
        if batch * (context + steps + SPARE) > held:
            left_out.append(point | {"because": f"the cache holds {held} tokens"})
            continue
        # reading twice as many tokens takes twice the time at least
        before = rows[-1] if rows else {"seconds": 0.0, "context": context, "batch": batch}
        grown = context * batch / (before["context"] * before["batch"])
        if time.monotonic() + before["seconds"] * grown > asked.ends:
            left_out.append(point | {"because": "no time was left"})
            continue
        rows.append(point | measure(llm, context, batch, steps))
        print(json.dumps(rows[-1]), flush=True)
    for point in left_out:
        print(f"{point['context']} x {point['batch']} is left out: {point['because']}")
    return {"rows": rows, "left_out": left_out, "steps": steps}


def points(contexts: Sequence[int], batches: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Name contexts and batches, those of the fewest tokens first."""
    both = [(context, batch) for context in contexts for batch in batches]
    yield from sorted(both, key=lambda point: point[0] * point[1])


def measure(llm: Any, context: int, batch: int, steps: int) -> dict[str, Any]:
    """Measure one point: the prompt's reading, and decoding's tokens/s."""
    began, prompts = time.perf_counter(), prompts_of(llm, [context] * batch)
    _, read = generate(llm, prompts, 1)
    generate(llm, prompts, steps // 4)  # warms up: kernels of both kinds of step compile here
    _, first = generate(llm, prompts, 1)
    done, whole = generate(llm, prompts, 1 + steps)
    reports = [(request.kv_transfer_params or {}).get("sfi") for request in done]
    ratios = [report["cache_read_ratio"] for report in reports if report]
    return {
        "prompt_seconds": read,
        "tokens_per_second": batch * steps / (whole - first),
        "read_ratio": sum(ratios) / len(ratios) if ratios else 1.0,
        "seconds": time.perf_counter() - began,
    }


def turns(asked: argparse.Namespace) -> int:
    """Let engines, a process each, read a point's prompts side by side, then decode in turns; write the file."""
    from sfi_core.measure.bench.architectures import ARCHITECTURES  # noqa: PLC0415 - after sys.path

    asked.folder.mkdir(parents=True, exist_ok=True)
    config = {**ARCHITECTURES["qwen3-0.6b"], "dtype": "bfloat16"}
    # the product with the vocabulary is as large a part of a step as with all layers
    config["vocab_size"] = config["vocab_size"] * int(asked.model) // config["num_hidden_layers"]
    config["num_hidden_layers"] = int(asked.model)
    (asked.folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": asked.cache, "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    words = ["--model", str(asked.folder), "--folder", str(asked.folder), "--output", str(asked.output)]
    words += ["--dry-run"] * asked.dry_run
    engines = {
        engine: subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, __file__, f"turn-{engine}", *words, "--sfi", asked.sfi, "--load-format", "dummy"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for engine in TURNS
    }  # fmt: skip
    facts = {
        "layers": int(asked.model), "vocabulary": config["vocab_size"], "vllm": installed(),
        "settings": TURN_SETTINGS | json.loads(asked.sfi),
    }  # fmt: skip
    file = asked.output / f"{datetime.now(UTC):%Y-%m-%d}-cpu-vllm-turns.json"
    rows: list[dict[str, Any]] = []
    for context, batch in points((64, 256) if asked.dry_run else TURN_CONTEXTS, TURN_BATCHES):
        if time.monotonic() > asked.ends:
            print(f"{context} x {batch} is left out: no time was left")
            continue
        point = {"context": context, "batch": batch}
        for process in engines.values():
            send(process, [context, batch, 0])
        read = [heard(process) for process in engines.values()]
        if not all(answer["fits"] for answer in read):
            print(f"{context} x {batch} is left out: the cache does not hold it")
            continue
        seconds: dict[str, list[float]] = {engine: [] for engine in TURNS}
        for number in range(TURN_COUNT):
            for engine, process in engines.items():
                send(process, [context, batch, TURN_STEPS])
                rows.append({"turn": number, "engine": engine, **point, **heard(process)})
                seconds[engine].append(rows[-1]["seconds"])
        for engine in TURNS[1:]:
            ratios = sorted(plain / ours for ours, plain in zip(seconds[engine], seconds["vllm"], strict=True))
            whole, (low, *_, high) = sum(seconds["vllm"]) / sum(seconds[engine]), ratios
            print(
                f"{context} x {batch}: {engine} is {whole:.2f} times as fast as vLLM, "
                f"by turn {median(ratios):.2f} ({low:.2f} to {high:.2f})", flush=True,
            )  # fmt: skip
        file.write_text(json.dumps({**facts, "stride": STRIDE, "steps": TURN_STEPS, "rows": rows}, indent=1) + "\n")
    for process in engines.values():
        process.communicate("")
    print(f"wrote {file}")
    return 0


def send(process: Any, words: list[int]) -> None:
    """Ask an engine's process for a context, a batch, and so many steps; 0 reads the prompts."""
    process.stdin.write(json.dumps(words) + "\n")
    process.stdin.flush()


def heard(process: Any) -> dict[str, Any]:
    """Return an engine's answer; what else the process prints is passed over."""
    while not (line := process.stdout.readline()).startswith('{"fits"'):
        if not line:
            raise RuntimeError(f"an engine ended with code {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def turn(asked: argparse.Namespace, engine: str) -> int:
    """Answer `turns`: read the prompts of a point, or time so many steps of their requests."""
    from vllm import SamplingParams  # noqa: PLC0415 - see `make`

    tokens = TURN_STEPS * TURN_COUNT + 2  # two before the first turn
    room = TURN_CONTEXTS[-1] + tokens + SPARE
    options = {} if asked.dry_run else {"dtype": "bfloat16", "enforce_eager": True}
    llm = make(asked, engine, TURN_SETTINGS, max_model_len=room, max_num_seqs=TURN_BATCHES[-1], **options)
    cache, core = llm.llm_engine.vllm_config.cache_config, llm.llm_engine
    wanted = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        context, batch, steps = json.loads(line)
        answer: dict[str, Any] = {"fits": batch * (context + tokens + SPARE) <= cache.num_gpu_blocks * cache.block_size}
        if answer["fits"] and not steps:
            prompts = prompts_of(llm, [context] * batch)
            generate(llm, prompts, 4)  # so that loops are compiled
            for number, prompt in enumerate(prompts):
                core.add_request(f"{context}-{batch}-{number}", {"prompt_token_ids": prompt}, wanted)
            known = 0
            while known < 2:  # noqa: PLR2004 - the first step reads the prompt's last token
                known = min([len(done.outputs[0].token_ids) for done in core.step()] or [0])
        began, done = time.perf_counter(), []
        for _ in range(steps):
            done = core.step()
        answer["seconds"] = round(time.perf_counter() - began, 4)
        if done and done[0].finished:
            report = (done[0].kv_transfer_params or {}).get("sfi") or {}
            answer["read_ratio"] = report.get("cache_read_ratio", 1.0)
        print(json.dumps(answer), flush=True)
    return 0


def table(asked: argparse.Namespace) -> int:
    """Join the parts, print the ratios, write the file; 1 where tokens differ."""
    numbers = {path.stem: json.loads(path.read_text()) for path in asked.folder.glob("*.json")}
    plain, ours = (numbers.get(f"equality-{engine}") for engine in ENGINES)
    gaps = differences(plain, ours) if plain and ours else None
    slow = {(r["context"], r["batch"]): r for r in numbers.get("speed-vllm", {}).get("rows", ())}
    rows = []
    for row in numbers.get("speed-sfi", {}).get("rows", ()):
        base = slow.get((row["context"], row["batch"]))
        if base:
            ratio = row["tokens_per_second"] / base["tokens_per_second"]
            rows.append({"vllm": base, "sfi": row, "ratio": ratio})
    print(f"{'context':>8} {'batch':>6} {'vLLM tok/s':>11} {'sfi tok/s':>11} {'ratio':>6} {'reads':>6}")
    for row in rows:
        a, b = row["vllm"], row["sfi"]
        print(
            f"{b['context']:>8} {b['batch']:>6} {a['tokens_per_second']:>11.1f} "
            f"{b['tokens_per_second']:>11.1f} {row['ratio']:>6.2f} {b['read_ratio']:>6.3f}"
        )
    equal = gaps is not None and all(gap is None or gap <= TIE for gap in gaps)
    says = "not measured" if gaps is None else f"{'yes' if equal else 'NO'}, gaps in nats {gaps}"
    print(f"budget above the context gives vLLM's tokens: {says}")
    name = f"{datetime.now(UTC):%Y-%m-%d}-{'dry-run' if asked.dry_run else machine_name()}-vllm"
    file = asked.output / f"{name}.json"
    facts = {
        "model": Path(asked.model).name or "bundled",
        "load_format": asked.load_format,
        "vllm": installed(),
        "torch": version("torch"),
        "sfi_settings": json.loads(asked.sfi),
        "stride": STRIDE,
    }
    parts = {"equality": {"gaps": gaps, "equal": equal}, "ratios": rows, "parts": numbers}
    file.write_text(json.dumps(facts | parts, indent=1) + "\n")
    print(f"wrote {file}")
    return 0 if equal and rows else 1


def differences(plain: dict[str, Any], ours: dict[str, Any]) -> list[float | None]:
    """Return how far apart the tokens are where a prompt's texts part, in nats; None where they do not."""
    gaps: list[float | None] = []
    for theirs, mine, steps in zip(plain["tokens"], ours["tokens"], plain["logprobs"], strict=True):
        parts = [place for place, pair in enumerate(zip(theirs, mine, strict=True)) if len({*pair}) > 1]
        if not parts:
            gaps.append(None)
            continue
        step, token = steps[parts[0]], mine[parts[0]]
        best = step[str(theirs[parts[0]])]
        gaps.append(round(best - step[str(token)], 4) if str(token) in step else 1e9)
    return gaps


def installed() -> str | None:
    """Return the version of vLLM, or of its build for CPUs; importing it takes seconds."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def machine_name() -> str:
    """Return the GPU's name, as a file's; that of the CPU where there is none."""
    import torch  # noqa: PLC0415 - `--help` needs none

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
