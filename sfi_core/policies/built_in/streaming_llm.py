"""StreamingLLM: sink and recent tokens only (Xiao et al., 2024, arXiv:2309.17453).

Unlike in the paper, keys keep their positions in the text in place of those in the cache.
"""

from sfi_core.policies.base import Policy
from sfi_core.settings.config import SfiConfig


class StreamingLLM(Policy):
    """Every step is fast and nothing is selected."""

    fills = True
    evicts = True
    drafts = True
    offloads = True

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Slide a window of `recent + budget` tokens, so that all methods read as many tokens."""
        return config.replace(recent_mode="sliding", recent=config.recent + config.budget)
