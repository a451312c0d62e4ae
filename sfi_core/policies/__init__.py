"""Decoding policies: which past tokens each KV head reads, and when that is decided anew."""

from sfi_core.errors import ConfigError
from sfi_core.policies.base import LayerContext, Policy, Selection, StepContext, StepPlan
from sfi_core.policies.full_kv import FullKV
from sfi_core.policies.oracle_top_k import OracleTopK
from sfi_core.policies.sfi import SFI
from sfi_core.policies.streaming_llm import StreamingLLM

POLICIES: dict[str, type[Policy]] = {
    "full-kv": FullKV,
    "sfi": SFI,
    "streaming-llm": StreamingLLM,
    "oracle-top-k": OracleTopK,
}


def policy_class(name: str) -> type[Policy]:
    """Look a policy up.

    Raises:
        ConfigError: No such policy.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; expected one of {tuple(POLICIES)}")
    return POLICIES[name]


__all__ = [
    "POLICIES",
    "SFI",
    "FullKV",
    "LayerContext",
    "OracleTopK",
    "Policy",
    "Selection",
    "StepContext",
    "StepPlan",
    "StreamingLLM",
    "policy_class",
]
