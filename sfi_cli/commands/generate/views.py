"""The report of `sfi generate`, from its document."""

from typing import Any

from sfi_core.engine import report_text
from sfi_core.machine.text import common_prefix
from sfi_core.settings.config import changed_settings

AROUND = 60  # characters shown before and after the first other token
OTHERS = ("comparison", "lossless")  # runs for comparison
# by the kinds of models in docs/evidence.md: sfi's KL over codescan's where each reads 15 % of 2,048 tokens in all
CLOSER = {"llama": 23, "gemma3_text": 29, "qwen2": 25}


def plan_line(plan: Any) -> str:
    """Say how many requests are decoded together, and how much memory they need."""
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


def advice_before(kind: str, config: Any, longest: int) -> str | None:
    """Advise a run of sfi over up to `longest` tokens, some of which fast steps leave out, on a measured model type."""
    if kind not in CLOSER or longest <= config.sink + config.budget + config.recent:
        return None
    closer = f"codescan was {CLOSER[kind]} times closer to full attention at equal reads"
    return f"advice       on models of type {kind} {closer}: --policy codescan"


def report_lines(document: dict[str, Any]) -> list[str]:
    """Sum a generation up: steps, reasons of slow steps, tokens read, speed, memory."""
    config, requests = document["config"], document["requests"]
    lines = [""]
    if "exact_match" in document:
        lines.append(f"answer       {_verdict(document)}")
    elif document["model"] == "bundled":
        lines.append("note         toy model: it only recalls sentences; for your own text try --model smollm2")
    lines.append(report_text.settings_line(changed_settings(config), document["preset"]))
    lines += report_text.request_lines(requests)
    room = config["sink"] + config["recent"] + config["budget"]
    longest = max((request["prompt_tokens"] + len(request["token_ids"]) for request in requests), default=room + 1)
    if document["policy"] != "full-kv" and longest <= room:
        read = "(sink, recent and budget) every step reads all: nothing to gain here"
        lines.append(f"note         up to {room:,} tokens {read}")
    lines += report_text.tier_lines(document["kv_tiers"])
    lines += report_text.fused_lines(document["fused"], document["left_alone"])
    lines += _speed_lines(document)
    return lines + report_text.launch_lines(document)


def _verdict(document: dict[str, Any]) -> str:
    if document["exact_match"]:
        return "correct, word for word"
    (request,), expected = document["requests"], document["expected"].split()
    if request["finish_reason"] == "length" and document["expected"].startswith(request["text"]):
        words = common_prefix(request["text"].split(), expected)
        return f"correct so far, {words} of {len(expected)} words; -n allows {len(request['token_ids'])} tokens"
    return "not the expected one"


def _speed_lines(document: dict[str, Any]) -> list[str]:
    rows = [(document["policy"] + ", lossless" * document["is_lossless"], document)]
    rows += [(other["policy"], other) for name in OTHERS if (other := document.get(name)) is not None]
    width = max(12, *(len(name) for name, _ in rows))
    lines = [
        f"{name:<{width}} {report_text.speed_words(data)}, peak memory {data['peak_memory_bytes'] / 1e6:,.0f} MB"
        for name, data in rows
    ]
    lines += report_text.compiled_lines(sum(data["compiling_seconds"] for _, data in rows))
    if "comparison" in document:
        lines += _compared(rows, document["comparison"])
    if document["advice"] is not None:
        lines.append(f"advice       {document['advice']}")
    return lines


def _compared(rows: list[tuple[str, dict[str, Any]]], full: dict[str, Any]) -> list[str]:
    # whether each run's tokens are full attention's, where not, and its speed over full attention's
    others = [(name, data) for name, data in rows if data is not full]

    def by_run(words: list[str]) -> str:
        named = (f"{name} {word}" for (name, _), word in zip(others, words, strict=True))
        return ", ".join(named) if len(others) > 1 else words[0]

    partings = [_parting(name, data, full) for name, data in others]
    same = ["no" if parting else "yes" for parting in partings]
    lines = [f"same tokens  {by_run(same)}", *filter(None, partings)]
    if theirs := full["steady_tokens_per_second"]:
        ratios = [f"{data['steady_tokens_per_second'] / theirs:.2f}" for _, data in others]
        lines.append(f"speed        {by_run(ratios)} times {full['policy']}'s, each measured once")
    return lines


def _parting(name: str, data: dict[str, Any], full: dict[str, Any]) -> str:
    # where a run's tokens first differ from full attention's, with the text around; "" where they do not
    for number, (ours, theirs) in enumerate(zip(data["requests"], full["requests"], strict=True)):
        if ours["token_ids"] != theirs["token_ids"]:
            step, shared = (common_prefix(ours[part], theirs[part]) for part in ("token_ids", "text"))
            before, request = ours["text"][:shared][-AROUND:], f" of request {number}" if number else ""
            here, there = (row["text"][shared:][:AROUND] for row in (ours, theirs))
            place = f"at step {step} of {len(ours['token_ids'])}{request}, after {before!r}"
            return f"they part    {place}: {name} {here!r}, {full['policy']} {there!r}"
    return ""
