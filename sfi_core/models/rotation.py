"""Models whose rotary embedding depends on the other tokens of a forward pass."""

from typing import Any

from sfi_core.errors import ConfigError


def pass_rotation(config: Any) -> str:
    """Return the kind of RoPE that rotates all tokens of a pass by its largest position; else "".

    With transformers' `longrope` and `dynamic` a token's keys depend on the pass that read the token: pieces
    of another size, or a longer request beside it, give other keys, and other tokens.
    """
    said = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for one in (said, *said.values()):  # of the model, or by kind of layer
        kind = one.get("rope_type") if isinstance(one, dict) else None
        if kind and (kind == "longrope" or "dynamic" in kind):
            return str(kind)
    return ""


def check_rotation(config: Any) -> None:
    """Raise `ConfigError` where tokens depend on how a text is cut into passes: no run is lossless."""
    if kind := pass_rotation(config):
        raise ConfigError(
            f"lossless must be off with RoPE of the kind {kind}, which rotates a pass by its largest position"
        )
