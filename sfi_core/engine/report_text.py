"""A run's report as lines of text, from the plain values of `RunReport.to_dict`."""

from collections.abc import Mapping, Sequence
from typing import Any

COMPILED = NOTED = 0.05  # seconds of compilation, and the share of decoding that recorded graphs; less is not told


def run_lines(report: Mapping[str, Any]) -> list[str]:
    """Sum a run up: settings, requests, memory, times, and how steps were launched."""
    return [
        settings_line(report["settings"], "default"),
        *request_lines(report["requests"]),
        *tier_lines(report["kv_tiers"]),
        *fused_lines(report["fused"], report["left_alone"]),
        f"run          {speed_words(report)}",
        *compiled_lines(report["compiling_seconds"]),
        *launch_lines(report),
    ]


def settings_line(changed: Mapping[str, Any], preset: str) -> str:
    """Name a preset and the settings that differ from the defaults."""
    words = ", ".join(f"{name} {value}" for name, value in changed.items())
    return f"settings     preset {preset}" + (f": {words}" if words else "")


def request_lines(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of each request its tokens, slow steps, reads, drafts and, if it waited, times."""
    names = [""] if len(requests) == 1 else [f"request {index}  " for index in range(len(requests))]
    return [line for name, request in zip(names, requests, strict=True) for line in _request_lines(name, request)]


def tier_lines(tiers: Mapping[str, Any] | None) -> list[str]:
    """Say where keys and values lay under a device budget; [] without one."""
    if tiers is None:
        return []
    names = "device_bytes", "allowed_bytes", "host_bytes", "recalled_bytes_per_step"
    device, allowed, host, recalled = (f"{tiers[name] / 1e6:,.1f} MB" for name in names)
    return [
        f"KV cache     {device} of {allowed} on the device, {host} in host memory",
        f"recalled     {recalled} a step, waited {tiers['recall_seconds']:.2f} s for them",
    ]


def fused_lines(fused: Mapping[str, int], left_alone: Mapping[str, int]) -> list[str]:
    """Count by class the modules that ran fused and those that did not; [] without fusion."""
    lines = []
    for name, modules in (("fused", fused), ("left alone", left_alone)):
        counts = ", ".join(f"{kind} x {count}" for kind, count in modules.items())
        lines += [f"{name:<13}{counts}"] if modules else []
    return lines


def speed_words(report: Mapping[str, Any]) -> str:
    """Say the times of prompts and decoding, tokens/s of steady steps and what was read, if a step was decoded."""
    prefill, rate = f"prefill {report['prefill_seconds']:.2f} s", report["steady_tokens_per_second"]
    if not rate:
        return prefill
    seconds, decoding = report["recording_seconds"], report["decode_seconds"]
    recording = f" ({seconds:.2f} s of it to record CUDA graphs, once)" if seconds > NOTED * decoding else ""
    read = f"cache read {_read(report['requests']):.1%}"
    return f"{prefill}, decode {decoding:.2f} s{recording}, steady {rate:,.1f} tokens/s, {read}"


def compiled_lines(seconds: float) -> list[str]:
    """Say how long numba compiled; [] if it did not."""
    return [f"compiled     {seconds:.1f} s for this processor, once; in no time above"] if seconds > COMPILED else []


def launch_lines(report: Mapping[str, Any]) -> list[str]:
    """Count replayed steps; say why steps were not replayed or compiled, and matrices of a GGUF file are unpacked."""
    replayed, eager = (report["paths"].get(f"graph.{how}", 0) for how in ("replay", "eager"))
    lines = []
    if replayed:
        lines.append(f"steps        {replayed:,} replayed as CUDA graphs, {eager:,} one kernel after the other")
    if report["not_replayed"]:
        lines.append(f"warning      steps ran one kernel after the other: {report['not_replayed']}")
    if report["not_compiled"]:
        lines.append(f"steps        module by module: {report['not_compiled']}")
    for name, why in [*report["not_blocks"].items()][:1]:
        more = f", and {len(report['not_blocks']) - 1} more" * (len(report["not_blocks"]) > 1)
        lines.append(f"weights      {name or 'all matrices'} unpacked: {why}{more}")
    return lines


def read_words(cache_read: float | None, attended: float | None, chosen: float | None) -> str:
    """Say which share of the cache was read, and both parts of it where choosing read some."""
    parts = f": {_percent(attended)} attended, {_percent(chosen)} to choose" if chosen else ""
    return _percent(cache_read) + parts


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _request_lines(prefix: str, request: Mapping[str, Any]) -> list[str]:
    slow, fast = request["slow_steps"], request["fast_steps"]
    reasons = ", ".join(f"{count} {name}" for name, count in request["reasons"].items())
    steps = " ".join(str(step) for step in request["slow_at"][:16])
    more = " ..." if slow > 16 else ""  # noqa: PLR2004
    # the mean of the steps' contexts, which grow
    context = request["mean_attended_tokens"] / (request["read_ratio"] or 1)
    cached = f" ({known:,} from the prompt cache)" if (known := request["cached_prompt_tokens"]) else ""
    counts = f"{request['prompt_tokens']:,} prompt{cached}, {len(request['token_ids']):,} generated"
    each = "step" if request["lossless"] is None else "token given"
    tokens = request["mean_attended_tokens"] + request["mean_selection_tokens"]
    share = read_words(*(request[f"{name}_ratio"] for name in ("cache_read", "read", "selection")))
    lines = [
        f"{prefix}tokens       {counts}, ended by {request['finish_reason']}",
        f"{prefix}slow steps   {slow} of {slow + fast} ({reasons}), at {steps}{more}",
        *[f"{prefix}cache read   {tokens:,.0f} of {context:,.0f} tokens a {each} ({share})"] * (context > 0),
    ]
    if (lossless := request["lossless"]) is not None:
        accepted = f"{lossless['accepted']:,} of {lossless['drafted']:,} drafted tokens kept"
        passes = f"{lossless['passes_per_token']:.2f} passes a token"
        lines.append(f"{prefix}lossless     {lossless['verifications']:,} verifications, {accepted}, {passes}")
    if request["queued_seconds"]:
        times = (f"{name} {request[f'{name}_seconds']:.2f} s" for name in ("prefill", "decode"))
        lines.append(f"{prefix}time         waited {request['queued_seconds']:.2f} s, {', '.join(times)}")
    return lines


def _read(requests: Sequence[Mapping[str, Any]]) -> float:
    # what all requests' steps read over what full attention reads in them
    read = context = 0.0
    for request in requests:
        tokens = request["mean_attended_tokens"] * (len(request["token_ids"]) - 1) / request["read_ratio"]
        context += tokens
        read += tokens * request["cache_read_ratio"]
    return read / context if context else 1.0
