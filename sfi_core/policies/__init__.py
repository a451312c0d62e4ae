"""Decoding policies: which past tokens each KV head reads, and when it selects them anew."""

from sfi_core.errors import ConfigError
from sfi_core.policies.base import EvidencePolicy, Policy, Selection
from sfi_core.policies.codescan import CodeScan
from sfi_core.policies.context import Evidence, LayerContext
from sfi_core.policies.freekv import FreeKV
from sfi_core.policies.full_kv import FullKV
from sfi_core.policies.oracle_top_k import OracleTopK
from sfi_core.policies.outside import import_policy, installed, package_of
from sfi_core.policies.prior_only import PriorOnly
from sfi_core.policies.quest import Quest
from sfi_core.policies.random_k import RandomK
from sfi_core.policies.sfi import SFI
from sfi_core.policies.shared import Triggered, best
from sfi_core.policies.snapkv import SnapKV
from sfi_core.policies.streaming_llm import StreamingLLM
from sfi_core.policies.synckv import SyncKV

POLICIES: dict[str, type[Policy]] = {
    "full-kv": FullKV,
    "sfi": SFI,
    "streaming-llm": StreamingLLM,
    "snapkv": SnapKV,
    "quest": Quest,
    "codescan": CodeScan,
    "freekv": FreeKV,
    "synckv": SyncKV,
    "oracle-top-k": OracleTopK,
    "random-k": RandomK,
    "prior-only": PriorOnly,
}


def policy_class(name: str) -> type[Policy]:
    """Look a policy up, ours or another package's.

    Raises:
        ConfigError: There is no such policy, or two, or it cannot be imported.
    """
    points = [point for point in installed() if point.name == name]
    owners = ["sfi"] if name in POLICIES else []
    owners += [f"package {package_of(point)}" for point in points]
    if len(owners) > 1:
        raise ConfigError(
            f"policy {name!r} is defined twice, by {' and by '.join(owners)}; remove one"
        )
    if not owners:
        known = (*POLICIES, *sorted({point.name for point in installed()}))
        raise ConfigError(f"unknown policy {name!r}; expected one of {known}")
    return import_policy(points[0]) if points else POLICIES[name]


__all__ = [
    "POLICIES",
    "SFI",
    "Evidence",
    "EvidencePolicy",
    "FullKV",
    "LayerContext",
    "OracleTopK",
    "Policy",
    "Selection",
    "StreamingLLM",
    "Triggered",
    "best",
    "policy_class",
]
