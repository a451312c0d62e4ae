"""What a slow step costs over a dense one, of this checkout and of others in turn, each in its own process.

    python benchmarks/slow_step.py --against ../before --output benchmarks/results/NAME.json

In a process `sfi`, every second step slow, and `full-kv` decode in turns, over a cache of random keys.
One thread, and CPU time: other work on the machine does not count, though it slows the memory down for all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from sfi_core import SfiConfig
from sfi_core.generation.sampling import Sampler
from sfi_core.generation.synthetic import SyntheticPrompt
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.slow_fast import slow_fast
from sfi_core.machine.describe import describe
from sfi_core.machine.versions import versions
from sfi_core.models.load import load
from sfi_core.settings.sampling import Sampling

WARM, STEPS = 2, 14  # steps of a turn
Steps = dict[str, list[float]]  # milliseconds by kind: dense, fast, slow


@torch.inference_mode()
def decode(model: Any, prompt: SyntheticPrompt, policy: str, config: SfiConfig) -> Steps:
    """Decode a turn; return the CPU milliseconds of its steps after the warm-up."""
    steps: Steps = {"dense": [], "fast": [], "slow": []}
    with slow_fast(model, None, config, policy=policy) as session:
        ids_BT = torch.ones(1, prompt.contexts[0], dtype=torch.long)
        decoder = Decoder(
            session=session, ids_BT=ids_BT, mask_BT=torch.ones_like(ids_BT),
            capacity=prompt.capacity, shared=prompt.shared(session),
        )  # fmt: skip
        sample = Sampler(Sampling(), ids_BT)
        token_B = sample(decoder.prefill(), [False], 0)
        decoder.record(token_B)
        for step in range(WARM + STEPS):
            began = time.process_time()
            token_B = sample(decoder.step(token_B), [False], 0)
            decoder.record(token_B)
            seconds = time.process_time() - began
            slow = session.run.requests[0].slow
            kind = "dense" if policy == "full-kv" else "slow" if slow else "fast"
            if step >= WARM:
                steps[kind].append(seconds * 1e3)
    return steps


def measure(contexts: list[int], settings: dict[str, Any], turns: int) -> dict[str, Steps]:
    """Decode at every context, `turns` times under each policy."""
    torch.set_num_threads(1)
    model, _ = load("smollm2", device="cpu")
    config = SfiConfig(trigger_policy="stride", stride=2, slow_start=1, **settings)
    found = {}
    for context in contexts:
        prompt = SyntheticPrompt([context], context + WARM + STEPS + 1)
        steps: Steps = {"dense": [], "fast": [], "slow": []}
        for _ in range(turns):
            for policy in ("sfi", "full-kv"):
                for kind, taken in decode(model, prompt, policy, config).items():
                    steps[kind] += taken
        found[str(context)] = steps
    return found


def summary(processes: list[dict[str, Steps]]) -> dict[str, dict[str, float]]:
    """Return the median of each kind of step by context, and what a slow step costs over a dense one."""
    rows = {}
    for context in processes[0]:
        row = {
            f"{kind}_ms": statistics.median([ms for one in processes for ms in one[context][kind]])
            for kind in ("dense", "fast", "slow")
        }
        rows[context] = {**row, "overhead_ms": row["slow_ms"] - row["dense_ms"]}
    return rows


def in_turn(checkouts: dict[str, Path], arguments: list[str], rounds: int) -> dict[str, Any]:
    """Measure each checkout in a process of its own, all of them in each round."""
    found: dict[str, list[dict[str, Steps]]] = {name: [] for name in checkouts}
    for _ in range(rounds):
        for name, root in checkouts.items():
            path = os.pathsep.join(str(root / part) for part in ("", "kernels", "traces"))
            done = subprocess.run(  # noqa: S603 - this very file
                [sys.executable, __file__, "--worker", *arguments],
                env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True,
            )  # fmt: skip
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, json.dumps(summary(found[name])), flush=True)
    return {name: summary(own) for name, own in found.items()}


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 4096, 8100])
    parser.add_argument("--settings", type=json.loads, default={"budget": 256, "recent": 128})
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        print(json.dumps(measure(asked.context, asked.settings, asked.turns)))
        return
    checkouts = {} if asked.against is None else {"before": asked.against.resolve()}
    checkouts["after"] = Path(__file__).resolve().parents[1]
    options = {"--context": list(map(str, asked.context)), "--turns": [str(asked.turns)]}
    arguments = [word for name, words in options.items() for word in (name, *words)]
    arguments += ["--settings", json.dumps(asked.settings)]
    document = {
        "medians": in_turn(checkouts, arguments, asked.rounds),
        "settings": {"model": "smollm2", "clock": "CPU time, one thread", **asked.settings},
        "turns": asked.turns, "rounds": asked.rounds, "steps": STEPS,
        "load_average": os.getloadavg(), "date": date.today().isoformat(),  # noqa: DTZ011
        "machine": describe(), "versions": versions(),
    }  # fmt: skip
    if asked.output:
        asked.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
