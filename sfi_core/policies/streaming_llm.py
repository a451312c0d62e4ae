"""StreamingLLM: sink and recent tokens only (Xiao et al., 2024, arXiv:2309.17453).

Differs from the paper in that keys keep the positions they had, instead of cache-relative ones.
"""

from sfi_core.policies.base import Policy
from sfi_core.settings.config import SfiConfig


class StreamingLLM(Policy):
    """Every step is fast; the budget that others select with goes to a longer recent window."""

    evicts = True
    drafts = True
    offloads = True

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Slide a window of `recent + budget` tokens, so that methods compare at equal tokens read."""
        return config.replace(recent_mode="sliding", recent=config.recent + config.budget)
