"""Decoding policies: which past tokens each KV head reads, and when that is decided anew."""

from sfi_core.errors import ConfigError
from sfi_core.policies.base import Policy, Selection, StepPlan
from sfi_core.policies.context import LayerContext, StepContext
from sfi_core.policies.full_kv import FullKV
from sfi_core.policies.h2o import H2O
from sfi_core.policies.oracle_top_k import OracleTopK
from sfi_core.policies.prior_only import PriorOnly
from sfi_core.policies.quest import Quest
from sfi_core.policies.random_k import RandomK
from sfi_core.policies.refreshkv import RefreshKV
from sfi_core.policies.sfi import SFI
from sfi_core.policies.snapkv import SnapKV
from sfi_core.policies.streaming_llm import StreamingLLM
from sfi_core.policies.tidaldecode import TidalDecode
from sfi_core.policies.tova import Tova

POLICIES: dict[str, type[Policy]] = {
    "full-kv": FullKV,
    "sfi": SFI,
    "streaming-llm": StreamingLLM,
    "snapkv": SnapKV,
    "h2o": H2O,
    "tova": Tova,
    "quest": Quest,
    "tidaldecode": TidalDecode,
    "refreshkv": RefreshKV,
    "oracle-top-k": OracleTopK,
    "random-k": RandomK,
    "prior-only": PriorOnly,
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
