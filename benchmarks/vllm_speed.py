"""What decoding costs in vLLM on a CPU, plain and with sfi, in turns.

    python benchmarks/vllm_speed.py --output benchmarks/results/NAME.json

`vllm` is an engine without sfi, `sfi` one with it, each in a process of its own; `off` are requests to the
second that ask for `sfi.enabled` 0, which vLLM's kernel serves: where memory holds one engine only. All wait
while one works. A model with random weights of Qwen3-0.6B's sizes; every `--stride`-th step of `sfi` is slow.
A context is random keys and values that vLLM finds in its prefix cache: to compute them takes such a
processor a quarter of an hour and more. The `--prompt` tokens behind it are read by the model. CPU seconds
besides seconds: other work on the machine counts in the latter only, though it slows the memory down for all.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_side import PLAIN, SFI, Engine, Side, Step

OFF = "off"
NOTES = (
    "a step brings one token to every request; seconds are medians over the steps of all turns",
    "tokens_per_second is of the mean step, slow ones included, with CPU seconds where it says so",
    "prompt: what the tokens behind the context took to read, the first selection included",
    "random weights select at random: places of selected tokens are not those of a text",
)


def prompts_of(context: int, batch: int) -> list[list[int]]:
    """Return random prompts."""
    made = []
    for place in range(batch):
        draw = random.Random(place)  # noqa: S311 - no secret
        made.append([draw.randrange(1000, 150000) for _ in range(context)])
    return made


def measure(
    sides: dict[str, Side], context: int, batch: int, asked: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure all that was asked for at a context, in turns; return a row for each."""
    names: list[str] = asked.engines
    found: dict[str, list[Step]] = {name: [] for name in names}
    read: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    prompts = prompts_of(context + asked.prompt, batch)
    tokens = asked.steps + asked.warm_up + asked.profile + 2
    for side in sides.values():
        side.ask("fill", [ids[:context] for ids in prompts])
    for turn in range(asked.turns):
        for name in names if turn % 2 == 0 else names[::-1]:
            side = side_of(sides, name)
            extra = {"sfi.enabled": 0} if name == OFF else {}
            read[name].append(side.ask("open", prompts, tokens, extra))
            side.ask("decode", asked.warm_up)
            own = side.ask("decode", asked.steps)
            found[name] += own
            mean = statistics.mean(step.cpu_seconds for step in own)
            told = f"{context} x {batch}, turn {turn + 1}, {name}: {mean:.4f} CPU s a step"
            print(told, read[name][-1], file=sys.stderr, flush=True)
            for table in side.ask("profile", asked.profile):
                print(table, file=sys.stderr, flush=True)
            side.ask("close")
    return [row_of(name, context, batch, found[name], read[name]) for name in names]


def side_of(sides: dict[str, Side], name: str) -> Side:
    """Return the process that serves."""
    return sides[SFI if name == OFF else name]


def row_of(
    name: str, context: int, batch: int, steps: Sequence[Step], read: list[dict[str, float]]
) -> dict[str, Any]:
    """Return what was measured of an engine at a context."""
    row: dict[str, Any] = {
        "engine": name, "context": context, "batch": batch, "prompts": read,
        "tokens_per_second": batch / statistics.mean(step.seconds for step in steps),
        "tokens_per_cpu_second": batch / statistics.mean(step.cpu_seconds for step in steps),
    }  # fmt: skip
    for kind, own in (
        ("fast" if name == SFI else "dense", [step for step in steps if not step.slow]),
        ("slow", [step for step in steps if step.slow]),
    ):
        if own:
            row[f"{kind}_step"] = {
                "steps": len(own),
                "seconds": statistics.median(step.seconds for step in own),
                "cpu_seconds": statistics.median(step.cpu_seconds for step in own),
            }
    return row | {"samples": [asdict(step) for step in steps]}


def line(row: dict[str, Any]) -> str:
    """Return a row for a reader."""
    shown = [
        f"{kind.removesuffix('_step')} {row[kind]['cpu_seconds']:.4f} CPU s"
        for kind in ("dense_step", "fast_step", "slow_step")
        if kind in row
    ]
    rates = f"{row['tokens_per_second']:.2f} tokens/s, {row['tokens_per_cpu_second']:.2f} a CPU s"
    prompt = f"prompt {min(one['cpu_seconds'] for one in row['prompts']):.1f} CPU s"
    return f"{row['context']:>6} x {row['batch']} {row['engine']:<5} {rates}; {', '.join(shown)}; {prompt}"


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", default="qwen3-0.6b", help="as `sfi bench --random`")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--context", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--stride", type=int, default=20, help="one slow step in so many")
    parser.add_argument("--sfi", default="{}", help="more settings of sfi, as JSON")
    parser.add_argument("--engines", nargs="+", choices=(PLAIN, OFF, SFI), default=[PLAIN, SFI])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="of each engine in a turn")
    parser.add_argument("--warm-up", type=int, default=3, help="steps that do not count")
    parser.add_argument("--profile", type=int, default=0, help="steps whose operations are shown")
    parser.add_argument("--prompt", type=int, default=512, help="tokens read behind the context")
    parser.add_argument("--piece", type=int, default=2048, help="tokens of a prompt read at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(words)
    if asked.output is not None and asked.output.exists():
        parser.error(f"output {asked.output} exists; remove the file or name another")
    return asked


def main(words: Sequence[str] | None = None) -> None:
    """Measure and write."""
    asked = parsed(words)
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    from sfi_core.machine.describe import describe  # noqa: PLC0415 - threads are set first
    from sfi_core.machine.versions import versions  # noqa: PLC0415
    from sfi_core.measure.bench.architectures import random_config  # noqa: PLC0415

    settings = {
        "trigger_policy": "stride",
        "stride": asked.stride,
        "cache_salt": False,  # both kinds of requests find the same context
        **json.loads(asked.sfi),
    }
    with tempfile.TemporaryDirectory() as folder:
        config = random_config(asked.architecture)
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        room = (
            max(asked.context)
            + asked.prompt
            + asked.turns * asked.steps
            + asked.warm_up
            + asked.profile
            + 8
        )
        sides = {
            name: Side(
                Engine(
                    name, folder, asked.dtype, asked.threads, room, asked.batch, asked.piece,
                    settings,
                )
            )
            for name in sorted({SFI if one == OFF else one for one in asked.engines})
        }  # fmt: skip
        rows: list[dict[str, Any]] = []
        for context in asked.context:
            rows += measure(sides, context, asked.batch, asked)
            for row in rows[-len(asked.engines) :]:
                print(line(row), flush=True)
            document = {
                "date": datetime.now(UTC).date().isoformat(), "rows": rows, "notes": NOTES,
                "settings": {n: v for n, v in vars(asked).items() if n != "output"}
                | {"sfi": settings},
                "load_average": os.getloadavg(), "machine": describe(), "versions": versions(),
            }  # fmt: skip
            if asked.output is not None:  # after each context: they take long
                asked.output.write_text(json.dumps(document, indent=1) + "\n")
        for side in sides.values():
            side.end()


if __name__ == "__main__":
    main()
