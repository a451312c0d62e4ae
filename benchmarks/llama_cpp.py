"""Decode one GGUF with llama.cpp and with sfi, run by run in turn, each in its own environment.

    pip install xllamacpp                       in an environment of its own, whose interpreter --python names
    python benchmarks/llama_cpp.py MODEL.gguf TEXT --python ENV/bin/python --output benchmarks/results/NAME.json

The prompt is the first tokens of TEXT; every run, a process of its own, really reads it, but for sfi's runs after the
first with --prompt-cache. llama.cpp computes with the
file's quantized weights, and so does sfi. On a CPU.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "llama.cpp, cache f16": {"cache": "F16"},
    "llama.cpp, cache q8_0": {"cache": "Q8_0"},
    "full-kv": {"policy": "full-kv"},
    "sfi": {"policy": "sfi", "recent": 128},
    "codescan": {"policy": "codescan", "recent": 16},
}
SHARE = 10  # a fast step reads the prompt's length / 10
SINK = 4
SHORT, WARM = 1024, 24  # tokens of the short run: its prompt's, and its own


def by_llama_cpp(asked: dict[str, Any]) -> dict[str, Any]:
    """Decode with llama.cpp's server, in this process."""
    import xllamacpp  # noqa: PLC0415 - not in our environment

    params = xllamacpp.CommonParams()
    params.model.path = asked["model"]
    params.n_ctx, params.n_parallel = asked["context"] + asked["tokens"] + 8, 1
    params.cpuparams.n_threads, params.cpuparams_batch.n_threads = asked["threads"], asked["prompt_threads"]
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{asked['cache']}")
    request = {
        "prompt": asked["prompt"], "n_predict": asked["tokens"], "temperature": 0, "ignore_eos": True,
        "cache_prompt": False,
    }  # fmt: skip
    timings = xllamacpp.Server(params).handle_completions(request)["timings"]
    return {
        "prompt_tokens": timings["prompt_n"],
        "decode_tokens_per_second": timings["predicted_per_second"],
        "prompt_tokens_per_second": timings["prompt_per_second"],
        "version": version("xllamacpp"),
    }


def by_sfi(asked: dict[str, Any]) -> dict[str, Any]:
    """Decode with `sfi_core.generate`, after a short run that compiles what the measured one needs."""
    import torch  # noqa: PLC0415 - not in llama.cpp's environment

    from sfi_core import PromptCache, SfiConfig, generate, load  # noqa: PLC0415
    from sfi_core.engine.prompt_cache import FILE  # noqa: PLC0415

    model, tokenizer = load(asked["model"], device="cpu")
    recent = asked.get("recent", 128)
    config = SfiConfig(budget=asked["context"] // SHARE - recent - SINK, recent=recent)
    at: list[float] = []

    def on_token(_: Any) -> None:
        torch.set_num_threads(asked["threads"])  # the prompt has been read
        at.append(time.perf_counter())

    folder, cache = asked["prompt_cache"], None
    if folder is not None:
        cache = PromptCache.load(folder) if (Path(folder) / FILE).exists() else PromptCache()
    for prompt, tokens, known in (
        (asked["prompt"][:SHORT], WARM, None), (asked["prompt"], asked["tokens"], cache)
    ):  # fmt: skip
        torch.set_num_threads(asked["prompt_threads"])
        at[:] = [time.perf_counter()]
        result = generate(
            model, tokenizer, [prompt], config, policy=asked["policy"], max_new_tokens=tokens, stop_token_ids=(),
            on_token=on_token, cache=known,
        )  # fmt: skip
    if cache is not None:
        cache.save(folder)
    report = result.report.requests[0]
    return {
        "prompt_tokens": report.prompt_tokens,
        "cached_prompt_tokens": report.cached_prompt_tokens,
        "decode_tokens_per_second": (len(at) - 2) / (at[-1] - at[1]),
        "prompt_tokens_per_second": (report.prompt_tokens - report.cached_prompt_tokens) / (at[1] - at[0]),
        "read_ratio": report.read_ratio + report.selection_ratio,
    }


def work() -> None:
    """Answer one request: JSON on stdin, JSON on stdout."""
    asked = json.load(sys.stdin)
    answer = (by_llama_cpp if "cache" in asked else by_sfi)(asked)
    answer["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("\n" + json.dumps(answer))


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Let the methods take turns at each context."""
    from sfi_core.machine.memory import describe  # noqa: PLC0415 - not in llama.cpp's environment
    from sfi_core.machine.versions import versions  # noqa: PLC0415
    from sfi_core.models.load import load_tokenizer  # noqa: PLC0415

    ids = load_tokenizer(asked.model)(asked.text.read_text(encoding="utf-8"))["input_ids"]
    rows: list[dict[str, Any]] = []
    for context in asked.contexts:
        if len(ids) < context:
            sys.exit(f"error: text must have {context} tokens, got {len(ids)}")
        request = {
            "model": asked.model, "threads": asked.threads, "tokens": asked.tokens, "context": context,
            "prompt_threads": asked.prompt_threads or asked.threads, "prompt": ids[:context],
            "prompt_cache": asked.prompt_cache and f"{asked.prompt_cache}-{context}",
        }  # fmt: skip
        for repeat in range(asked.repeats):
            for name in asked.methods:
                method = METHODS[name]
                python = asked.python if "cache" in method else sys.executable
                asking: dict[str, Any] = {
                    "input": json.dumps(request | method), "text": True, "stdout": subprocess.PIPE,
                    "env": os.environ | {"OMP_WAIT_POLICY": "passive"},  # as `sfi` sets it
                }  # fmt: skip
                if "cache" in method:
                    asking["stderr"] = subprocess.DEVNULL
                done = subprocess.run([python, __file__, "--work"], check=True, **asking)  # noqa: S603 - our own script
                answer = json.loads(done.stdout.splitlines()[-1])
                rows.append({"method": name, "context": context, "repeat": repeat, **answer})
                print(f"{context} {name}: {answer['decode_tokens_per_second']:.1f} tokens/s", file=sys.stderr)
    for context in asked.contexts:
        for name in asked.methods:
            some = [row for row in rows if (row["context"], row["method"]) == (context, name)]
            decode, prompt = (
                statistics.median(row[key] for row in some)
                for key in ("decode_tokens_per_second", "prompt_tokens_per_second")
            )
            print(f"| {context:,} | {name} | {decode:.1f} | {prompt:.0f} |", file=sys.stderr)
    return {
        "date": datetime.now(UTC).date().isoformat(), "model": Path(asked.model).name, "rows": rows,
        "settings": {key: request[key] for key in ("threads", "prompt_threads", "tokens")} | {"share": 1 / SHARE},
        "machine": describe(), "versions": versions(),
    }  # fmt: skip


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("text", type=Path)
    parser.add_argument("--python", required=True, help="the interpreter that has xllamacpp")
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-threads", type=int, help="of reading the prompt; the same unless given")
    parser.add_argument("--prompt-cache", help="a folder a context, by this name: sfi reads each prompt once")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    text = json.dumps(measure(asked), indent=1) + "\n"
    if asked.output is not None:
        asked.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    work() if "--work" in sys.argv else main()
