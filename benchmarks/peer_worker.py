"""Decode once in one environment: JSON on stdin, JSON on stdout. `peers.py` starts it for every run.

The environment of kvpress has no sfi, and ours has no kvpress: each is imported where a run needs it.
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

    def put(self, value: object) -> None:
        """Note them."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to finish."""


def by_transformers(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Decode with `model.generate`, under a press where one is named."""
    cache, clock = DynamicCache(config=model.config), StepClock()
    press: Any = nullcontext()
    if "press" in request:
        import kvpress  # noqa: PLC0415 - not in our environment

        press = kvpress.DecodingPress(
            base_press=getattr(kvpress, request["press"])(),
            target_size=request["target"],
            compression_interval=request["interval"],
        )(model)
    ids_BT = torch.tensor([request["prompt"]])
    with torch.no_grad(), press:
        model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            past_key_values=cache,
            max_new_tokens=request["tokens"],
            do_sample=False,
            streamer=clock,
        )
    return {"began": clock.at[0], "at": clock.at[1:], "cached_tokens": cache.get_seq_length()}


def by_sfi(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Decode with `sfi_core.generate`."""
    from sfi_core import SfiConfig, generate  # noqa: PLC0415 - not in kvpress' environment

    clock, began = StepClock(), time.perf_counter()
    result = generate(
        model,
        None,
        [request["prompt"]],
        SfiConfig().replace(**request["config"]),
        policy=request["policy"],
        max_new_tokens=request["tokens"],
        stop_token_ids=(),
        on_token=clock.put,
    )
    return {"began": began, "at": clock.at, "slow_steps": result.report.requests[0].slow_steps}


def installed(package: str) -> str | None:
    """Return a package's version; None where it is not here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
    answer = (by_sfi if "policy" in request else by_transformers)(model, request)
    answer["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(answer | {"versions": {name: installed(name) for name in PACKAGES}}))


if __name__ == "__main__":
    main()
