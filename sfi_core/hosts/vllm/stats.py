"""The server's counts: vLLM's log line and its `/metrics`."""

from typing import Any

from sfi_core.hosts.vllm.names import KVConnectorPromMetrics, KVConnectorStats
from sfi_core.hosts.vllm.planner import TOTALS, Planner

MEANINGS = {
    "slow_steps": "Decoding steps, prompts' last included, that attended to everything.",
    "fast_steps": "Decoding steps that attended to sink, selected and recent tokens.",
    "dense_steps": "Those of the slow steps whose request had no slot.",
    "requests": "Requests that have ended.",
    "attended": "Cached tokens that decoding steps attended to, the mean over KV heads and layers.",
    "context": "Cached tokens that full attention would have read in these steps.",
    "selection": "What choosing read in these steps, in cached tokens' worth.",
}


class ServerStats(KVConnectorStats):
    """Counts since the last report, by the names of `TOTALS`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        self._told: dict[str, float] = {}

    def since(self, planner: Planner) -> "ServerStats":
        """Return a planner's counts since the last call."""
        new = {name: value - self._told.get(name, 0) for name, value in planner.totals.items()}
        self._told = dict(planner.totals)
        return ServerStats(new)

    def reset(self) -> None:
        """Forget the counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> "ServerStats":
        """Add another's counts."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log line."""
        counts = {f"sfi_{name}": int(self.data.get(name, 0)) for name in TOTALS[:4]}
        context = self.data.get("context", 0)
        attended = self.data.get("attended", 0) / context if context else 1.0
        chosen = self.data.get("selection", 0) / context if context else 0.0
        ratios = {"read_ratio": attended, "cache_read_ratio": attended + chosen}
        return {**counts, **{f"sfi_{name}": round(ratio, 4) for name, ratio in ratios.items()}}

    def is_empty(self) -> bool:
        """Say whether all counts are 0."""
        return not any(self.data.values())


class SfiMetrics(KVConnectorPromMetrics):
    """Counters `vllm:sfi_<name>` for Prometheus, by engine."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: dict[int, Any]) -> None:
        super().__init__(config, types, labels, values)
        self._counters = {
            name: {engine: counter.labels(*own) for engine, own in values.items()}
            for name in TOTALS
            for counter in [self._counter_cls(name=f"vllm:sfi_{name}", documentation=MEANINGS[name], labelnames=labels)]
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
