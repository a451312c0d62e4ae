"""What torch.profiler saw of one replay: kernels, their times, and how much of the span they fill."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.smoke.plan import Plan

ON_DEVICE, ON_HOST = {"kernel", "gpu_memcpy", "gpu_memset"}, {"cpu_op"}
SIDE = ("_selector_", "_top_k_", "_pack_kernel")
TOP = 15


def profiled(call: Callable[[], object], plan: Plan) -> dict[str, Any]:
    """Run a call under torch.profiler and sum up what the device did; on a CPU, the operators."""
    activities = [ProfilerActivity.CPU, *([] if plan.dry else [ProfilerActivity.CUDA])]
    with profile(activities=activities) as seen:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    of = ON_HOST if plan.dry else ON_DEVICE
    return {"of": ", ".join(sorted(of)), **summed([event for event in events if event.get("cat") in of])}


def summed(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up events of a Chrome trace, in microseconds.

    Args:
        events: With a name, a begin `ts` and a length `dur`.

    Returns:
        How many nodes there are; the span from the first to the last; the kernels' own times added up; how
        long at least one ran, none ran, and more than one ran; the same of the side's kernels; and the names
        that took most, with their calls.
    """
    nodes = [(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"]) for event in events]
    if not nodes:
        return {"nodes": 0}
    spans = [(begin, end) for begin, end, _ in nodes]
    added, busy = sum(end - begin for begin, end in spans), covered(spans)
    span = max(end for _, end in spans) - min(begin for begin, _ in spans)
    side = [(b, e) for b, e, name in nodes if any(word in name for word in SIDE)]
    main = [(b, e) for b, e, name in nodes if not any(word in name for word in SIDE)]
    beside = covered(side) + covered(main) - busy
    return {
        "nodes": len(nodes),
        "span_us": span,
        "added_us": added,
        "busy_us": busy,
        "idle_us": span - busy,
        "several_at_once_us": added - busy,
        "side_us": sum(end - begin for begin, end in side),
        "side_beside_main_us": beside,
        "top": longest(nodes),
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of some spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def longest(nodes: Iterable[tuple[float, float, str]]) -> list[dict[str, Any]]:
    """Return the names that took most time, each with its calls and microseconds."""
    times: dict[str, list[float]] = defaultdict(list)
    for begin, end, name in nodes:
        times[name].append(end - begin)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
    return [{"us": round(sum(us), 1), "calls": len(us), "name": name[:90]} for name, us in ranked]
