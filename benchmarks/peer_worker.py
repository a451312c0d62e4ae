"""Decode in one environment, on request: a JSON line in, a JSON line out. `peers.py` starts it.

    python benchmarks/peer_worker.py MODEL DTYPE THREADS

The environment of kvpress has no sfi, and ours has no kvpress: imports wait until a request needs them.
"""

import json
import resource
import sys
import time
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

PACKAGES = ("torch", "transformers", "kvpress", "sfi-toolkit")


class StepClock:
    """A streamer that notes when the prompt and each step's tokens arrive."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note them."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to finish."""


def press_of(name: str, target: int, interval: int) -> Any:
    """Make kvpress' DecodingPress around one of its scorers."""
    import kvpress  # noqa: PLC0415 - not in our environment

    scorer = getattr(kvpress, name)()
    return kvpress.DecodingPress(
        base_press=scorer, target_size=target, compression_interval=interval
    )


def by_transformers(model: Any, ids_BT: torch.Tensor, request: dict[str, Any]) -> dict[str, Any]:
    """Decode with `model.generate`, under a press where one is named."""
    cache, clock = DynamicCache(config=model.config), StepClock()
    name = request["press"]
    press = press_of(name, request["target"], request["interval"]) if name else None
    with press(model) if press else nullcontext():
        model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            past_key_values=cache,
            max_new_tokens=request["tokens"],
            do_sample=False,
            streamer=clock,
        )
    return {"began": clock.at[0], "at": clock.at[1:], "cached_tokens": cache.get_seq_length()}


def by_sfi(model: Any, ids_BT: torch.Tensor, request: dict[str, Any]) -> dict[str, Any]:
    """Decode with `sfi_core.generate`."""
    from sfi_core import SfiConfig, generate  # noqa: PLC0415 - not in kvpress' environment

    clock = StepClock()
    began = time.perf_counter()
    result = generate(
        model,
        None,
        ids_BT.tolist(),
        SfiConfig().replace(**request["config"]),
        policy=request["policy"],
        max_new_tokens=request["tokens"],
        stop_token_ids=(),
        on_token=lambda _: clock.put(ids_BT),
    )
    first = result.report.requests[0]
    return {"began": began, "at": clock.at, "slow_steps": first.slow_steps}


def main() -> None:
    """Answer requests until stdin closes."""
    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    print(json.dumps({"versions": found}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        decode = by_sfi if request["policy"] else by_transformers
        with torch.no_grad():
            answer = decode(model, torch.tensor(request["prompts"]), request)
        answer["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
