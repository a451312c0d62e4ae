"""StreamingLLM: sink and recent tokens only (Xiao et al., 2024, arXiv:2309.17453).

Unlike in the paper, keys keep their positions in the text in place of those in the cache.
"""

from typing import ClassVar

from sfi_core.policies.base import Policy


class StreamingLLM(Policy):
    """Every step is fast and nothing is selected."""

    fills = evicts = drafts = offloads = True
    # a window of so many tokens, so that all methods read as many
    fixed: ClassVar = {"recent_mode": "sliding", "recent": lambda config: config.recent + config.budget}
