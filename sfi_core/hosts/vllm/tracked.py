"""The scheduler's record of one request, in plain numbers; no tensor, no vLLM."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sfi_core.engine.ledger import OpenStep
from sfi_core.engine.report import RequestReport
from sfi_core.hosts.vllm.entry import NO_SLOT
from sfi_core.hosts.vllm.request_settings import RequestSettings
from sfi_core.policies.base import Policy
from sfi_core.state.request import RequestState

# what `sfi generate --json` says of a request too
SHARED = (
    "prompt_tokens", "slow_steps", "fast_steps", "slow_at", "reasons",
    "mean_attended_tokens", "mean_selection_tokens", "read_ratio", "selection_ratio", "cache_read_ratio",
    "stored_ratio",
)  # fmt: skip


@dataclass(slots=True)
class Tracked:
    """One request from its arrival to its end.

    vLLM's request is `live`; its `num_tokens` and `output_token_ids` grow as tokens become known. `slot` is
    `NO_SLOT` while it has none; `begun` says whether its prompt has been read; `preempted` counts how often
    it lost its blocks of the cache. `pending` are steps whose token is not known yet, each with the fields
    that its engine step's requests share, which are filled in later.
    """

    live: Any
    settings: RequestSettings
    policy: Policy
    state: RequestState
    slot: int = NO_SLOT
    begun: bool = False
    blocks: list[int] = field(default_factory=list)
    pending: deque[tuple[OpenStep, Mapping[str, Any]]] = field(default_factory=deque)
    preempted: int = 0

    def report(self) -> dict[str, Any]:
        """Return the report in the request's answer, plain values."""
        shared = RequestReport.of(self.state, frozenset(), evicts=self.policy.evicts)
        told: dict[str, Any] = {name: getattr(shared, name) for name in SHARED}
        told |= {"preempted": self.preempted, "dense_steps": shared.reasons.get("dense", 0)}
        return {**told, "error": self.settings.error} if self.settings.error else told
