"""Settings of the audit; the command line reads its defaults here, so no torch."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from sfi_core.settings.fields import check, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """What to audit; each field says what it does."""

    every: int = setting(
        1,
        "Compare every N-th step with dense attention. The tokens stay the same. Slow steps are always "
        "audited: what follows is compared with them.",
        above=0,
    )
    top: int = setting(1024, "Positions of an audited support, K.", above=0)
    layers: tuple[int, ...] | None = setting(
        None, "Only these layers; none is all that sfi manages.", least=0
    )

    def __post_init__(self) -> None:
        """Reject what cannot be audited."""
        check(self)

    def due(self, step: int, *, slow: bool) -> bool:
        """Say whether a request's step is audited."""
        return slow or step % self.every == 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)
