"""Settings of the audit. No torch: the command line imports this."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from sfi_core.settings.fields import Table, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig(Table):
    """Which steps and layers to compare with dense attention, and on how many positions."""

    every: int = setting(
        1,
        "Compare every N-th step with dense attention. The tokens stay the same. Slow steps are always "
        "audited: later steps are compared with them.",
        above=0,
    )
    top: int = setting(1024, "Positions of an audited support, K: those with the most attention.", above=0)
    layers: tuple[int, ...] | None = setting(
        None, "Audit only these layers; none audits all that sfi manages.", least=0
    )

    def due(self, step: int, *, slow: bool) -> bool:
        """Say whether a request's step is audited."""
        return slow or step % self.every == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON."""
        return dataclasses.asdict(self)
