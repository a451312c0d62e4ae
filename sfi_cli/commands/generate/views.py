"""What a person reads at the end of a command, from plain data."""

from typing import Any


def plan_line(plan: Any) -> str:
    """Say how many requests will be decoded together, and what that needs."""
    together = "all together" if plan.slots == plan.requests else f"{plan.slots} at a time"
    free = "" if plan.free_bytes is None else f" of {plan.free_bytes / 1e9:.2f} GB free"
    if plan.tiers is None:
        cache = plan.forecast.kv_bytes + plan.forecast.norm_bytes
        where = f"{cache / 1e9:.2f} GB of it KV cache"
    else:
        device, host = (size / 1e9 for size in (plan.tiers.device_bytes, plan.tiers.host_bytes))
        where = f"KV cache {device:.2f} GB on the device, {host:.2f} GB in host memory"
    needed = plan.forecast.needed_bytes / 1e9
    return f"{plan.requests} requests, {together}; forecast {needed:.2f} GB{free}, {where}"


def report_lines(document: dict[str, Any]) -> list[str]:
    """Sum a generation up: steps, reasons, what was read, speed, memory."""
    lines = [""]
    if "exact_match" in document:
        verdict = "correct, word for word" if document["exact_match"] else "not the expected one"
        lines.append(f"answer       {verdict}")
    for index, request in enumerate(document["requests"]):
        lines += _request_lines(
            request, f"request {index}  " if len(document["requests"]) > 1 else ""
        )
    lines += _tier_lines(document["kv_tiers"])
    lines += fused_lines(document["fused"], document["left_alone"])
    lines += _speed_lines(document)
    if document["not_replayed"]:
        lines.append(
            f"warning      steps ran one kernel after the other: {document['not_replayed']}"
        )
    return lines


def fused_lines(fused: dict[str, int], left_alone: dict[str, int]) -> list[str]:
    """Say which modules ran fused and which did not, by class; nothing where fusion was off."""
    told = []
    for name, modules in (("fused", fused), ("left alone", left_alone)):
        counts = ", ".join(f"{kind} x {count}" for kind, count in modules.items())
        told += [f"{name:<13}{counts}"] if modules else []
    return told


def _request_lines(request: dict[str, Any], prefix: str) -> list[str]:
    slow, fast = request["slow_steps"], request["fast_steps"]
    reasons = ", ".join(f"{count} {name}" for name, count in request["reasons"].items())
    steps = " ".join(str(step) for step in request["slow_at"][:16])
    more = " ..." if slow > 16 else ""  # noqa: PLR2004
    context = request["prompt_tokens"] + len(request["token_ids"])
    counts = f"{request['prompt_tokens']:,} prompt, {len(request['token_ids']):,} generated"
    read = f"{request['mean_attended_tokens']:,.0f} of {context:,} tokens a step"
    lines = [
        f"{prefix}tokens       {counts}, ended by {request['finish_reason']}",
        f"{prefix}slow steps   {slow} of {slow + fast} ({reasons}), at {steps}{more}",
        f"{prefix}cache read   {read} ({request['read_ratio']:.1%} over all decoding steps)",
    ]
    if request["queued_seconds"]:
        times = (f"{name} {request[f'{name}_seconds']:.2f} s" for name in ("prefill", "decode"))
        lines.append(
            f"{prefix}time         waited {request['queued_seconds']:.2f} s, {', '.join(times)}"
        )
    return lines


def _tier_lines(tiers: dict[str, Any] | None) -> list[str]:
    if tiers is None:
        return []
    device, allowed, host, recalled = (
        f"{tiers[name] / 1e6:,.1f} MB"
        for name in ("device_bytes", "allowed_bytes", "host_bytes", "recalled_bytes_per_step")
    )
    waited = f"waited {tiers['recall_seconds']:.2f} s for them"
    return [
        f"KV cache     {device} of {allowed} on the device, {host} in host memory",
        f"recalled     {recalled} a step, {waited}",
    ]


def _speed_lines(document: dict[str, Any]) -> list[str]:
    rows = [(document["policy"], document)]
    if "comparison" in document:
        rows.append((document["comparison"]["policy"], document["comparison"]))
    lines = [
        f"{name:<12} prefill {data['prefill_seconds']:.2f} s, decode {data['decode_seconds']:.2f} s, "
        f"{data['decode_tokens_per_second']:,.1f} tokens/s, "
        f"peak memory {data['peak_memory_bytes'] / 1e6:,.0f} MB"
        for name, data in rows
    ]
    if "comparison" in document:
        same = [r["token_ids"] for r in document["requests"]] == [
            r["token_ids"] for r in document["comparison"]["requests"]
        ]
        lines.append(f"same tokens  {'yes' if same else 'no'}")
        ours, theirs = (data["decode_tokens_per_second"] for _, data in rows)
        if theirs:
            lines.append(
                f"speed        {ours / theirs:.2f} times {rows[1][0]}'s, each measured once"
            )
    if document["advice"] is not None:
        lines.append(f"advice       {document['advice']}")
    return lines
