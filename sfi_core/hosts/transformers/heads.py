"""The head clusters of a run: finding their file, and checking that the model is theirs."""

from typing import Any

from sfi_core.errors import ConfigError
from sfi_core.models.digest import HEADS, folder_of, model_digest
from sfi_core.policies import Policy
from sfi_core.policies.built_in.synckv import SyncKV
from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_shape import LayerShape


def with_head_file(config: SfiConfig, policy: str, model: Any) -> SfiConfig:
    """Return settings with the head file of the model's folder, where synckv names no other."""
    folder = folder_of(model)
    if policy != "synckv" or config.synckv.heads is not None or folder is None:
        return config
    file = folder / HEADS
    return config.replace(synckv={"heads": str(file)}) if file.is_file() else config


def check_heads(policy: Policy, shapes: list[LayerShape], model: Any, ranks: int) -> None:
    """Raise `ConfigError` for head clusters of another model, and for mixed heads on several ranks."""
    if policy.mixes_heads and ranks > 1:
        raise ConfigError(
            f"policies whose KV heads differ (synckv) must run on one rank, got {ranks}"
        )
    if not isinstance(policy, SyncKV):
        return
    heads = {layer: shape.heads for layer, shape in enumerate(shapes) if shape.window is None}
    if policy.clusters is not None:
        policy.clusters.check(heads, model_digest(model))
    for layer, count in heads.items():
        policy.leaders(layer, count)
