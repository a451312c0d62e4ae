"""Settings of the audit; the command line reads its defaults here, so no torch."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sfi_core.errors import ConfigError

if TYPE_CHECKING:
    from sfi_core.state.layer_shape import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """What to audit.

    Attributes:
        every: Every how many steps. Slow steps are always audited: what follows is compared with them.
        top: Positions of a support, K.
        layers: Only these layers; None is all that sfi manages.
        heads: Only these KV heads; None is all.
    """

    every: int = 1
    top: int = 1024
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Reject what cannot be audited."""
        for name, option in (("every", "--audit"), ("top", "--audit-top")):
            if getattr(self, name) < 1:
                raise ConfigError(f"{option} must be positive, got {getattr(self, name)}")

    def check(self, shapes: "Sequence[LayerShape]") -> None:
        """Refuse layers and heads that the model does not have.

        Raises:
            ConfigError: With those that it has.
        """
        managed = [layer for layer, shape in enumerate(shapes) if shape.window is None]
        odd = sorted(set(self.layers or ()) - set(managed))
        if odd:
            raise ConfigError(f"--audit-layers must be among {managed}, got {odd}")
        fewest = min(shapes[layer].heads for layer in self.layers or managed)
        wrong = [head for head in self.heads or () if not 0 <= head < fewest]
        if wrong:
            raise ConfigError(f"--audit-heads must be in 0 to {fewest - 1}, got {wrong}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)
