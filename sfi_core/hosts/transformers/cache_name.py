"""The argument that holds a model's cache: `past_key_values`, which transformers 5.24 renamed to `cache`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

OLD_NAME = "past_key_values"
CACHE_NAME = "cache" if "cache" in [f.name for f in fields(CausalLMOutputWithPast)] else OLD_NAME


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among a call's arguments, under either name; None if there is none."""
    return arguments.get(CACHE_NAME, arguments.get(OLD_NAME))
