"""What a model's rotary embedding (RoPE) says: how long a text may be, and whether a pass rotates by its longest."""

from collections.abc import Iterator
from typing import Any

from sfi_core.errors import ConfigError

EXTENDED = (None, "default", "llama3", "longrope")  # kinds whose factor leaves the config's length as it is


def pass_rotation(config: Any) -> str:
    """Return the kind of RoPE that rotates a pass's tokens by its largest position (longrope, dynamic); else ""."""
    kinds = (str(rope.get("rope_type")) for rope in _ropes(config.get_text_config(decoder=True)))
    return next((kind for kind in kinds if kind == "longrope" or "dynamic" in kind), "")


def most_positions(config: Any) -> int | None:
    """Return the most tokens of a text, prompt and answer; None where the config names no limit.

    A factor of scaled RoPE (yarn, linear, dynamic) extends `max_position_embeddings`, or what a yarn config names as
    the original length; with llama3 and longrope, and in Gemma 3, `max_position_embeddings` is the extended length
    already. vLLM has the same rule, but for a yarn config whose `max_position_embeddings` is longer yet: that counts.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if not limit:
        return None
    longest = limit
    for rope in _ropes(text):
        kind, factor = rope.get("rope_type"), rope.get("factor")
        if factor and kind not in EXTENDED and "gemma3" not in text.model_type:
            original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
            longest = max(longest, int(factor * (original or limit)))
    return int(longest)


def _ropes(text: Any) -> Iterator[dict[str, Any]]:
    # the parameters of the model, or by kind of layer
    parameters = getattr(text, "rope_parameters", None) or {}
    return (rope for rope in (parameters, *parameters.values()) if isinstance(rope, dict))


def check_rotation(config: Any) -> None:
    """Raise `ConfigError` where tokens depend on how a text is cut into passes: no run is lossless."""
    if kind := pass_rotation(config):
        raise ConfigError(
            f"lossless must be off with RoPE of the kind {kind}, which rotates a pass by its largest position"
        )
