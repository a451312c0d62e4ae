"""Settings of the audit; the command line reads its defaults here, so no torch."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from sfi_core.errors import ConfigError


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

    def due(self, step: int, *, slow: bool) -> bool:
        """Say whether a request's step is audited."""
        return slow or step % self.every == 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)
