"""What a lossless run needs of a model, a policy and the engine's options."""

from collections.abc import Mapping, Sequence
from typing import Any

from sfi_core.errors import ConfigError
from sfi_core.policies import POLICIES
from sfi_core.policies.base import Policy
from sfi_core.settings.engine import EngineOptions
from sfi_core.state.layer_pages import LayerShape

LEAST_WINDOW = 3  # a sliding window that still holds a token before a draft of one


# by setting of `model.generate`: what it asks for
REFUSED = {
    "output_scores": "reading scores",
    "output_logits": "reading logits",
    "output_hidden_states": "reading hidden states",
    "stop_strings": "stop_strings",
    "token_healing": "token healing",
    "max_time": "max_time",
    "stopping_criteria": "a stopping criterion of one's own",
    "inputs_embeds": "a prompt of embeddings",
    "position_ids": "position_ids of one's own",
    "cache": "a cache of one's own",
    "past_key_values": "a cache of one's own",
    "remove_invalid_values": "replacing broken logits",
}


def refuse_in_lossless(settings: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for arguments of `model.generate` that run under sfi, but not losslessly."""
    for name, what in REFUSED.items():
        value = kwargs.get(name, getattr(settings, name, None))
        if not (value is None or value is False or value == []):
            raise ConfigError(f"{what} does not run in a lossless run, got {name}")


def check_drafts(policy: Policy | type[Policy], name: str) -> None:
    """Raise `ConfigError` for a policy that cannot draft; the message lists those that can."""
    if not policy.drafts:
        able = ", ".join(sorted(policy_name for policy_name, kind in POLICIES.items() if kind.drafts))
        raise ConfigError(f"policy {name} cannot draft for a lossless run; those that can: {able}")


def check_asked(policy: Policy, name: str, engine: EngineOptions, *, audited: bool) -> None:
    """Raise `ConfigError` for settings that a lossless run cannot have, whatever the model."""
    check_drafts(policy, name)
    off = "lossless must be off with"
    if engine.kv_device_budget is not None:
        raise ConfigError(f"{off} kv_device_budget, whose host pages cannot be taken back")
    if audited:
        raise ConfigError(f"{off} an audit: a lossless run compares every drafted token itself")


def most_drafted(shapes: Sequence[LayerShape], asked: int) -> int:
    """Return the most tokens of a draft: a sliding window must hold them and the token before."""
    windows = [shape.window for shape in shapes if shape.window]
    return max(1, min([asked, *(window - LEAST_WINDOW + 1 for window in windows)]))
