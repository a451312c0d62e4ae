"""SnapKV: what the prompt's last queries attended, pooled (Li et al., 2024, arXiv:2404.14469).

Differs from the authors' code in that the query heads of a KV head share a set, by their mean, and that sink
tokens are always kept. Their window is `window_prefill`; every decoded token is kept, as in theirs.
"""

from typing import ClassVar

import torch

from sfi_core.policies.base import Evidence, EvidencePolicy, Selection, best

POOL = 5  # positions over which a score is averaged; the authors' kernel size


class SnapKV(EvidencePolicy):
    """Select once, after the prompt; every later step is fast. A lossless run's verifications select anew."""

    fills = evicts = drafts = offloads = True
    fixed: ClassVar = {"recent_mode": "anchored"}  # where the prompt left it

    def select_after(self, context: Evidence) -> Selection:
        """Keep the positions with the most attention of the window, averaged over their neighbors."""
        mean_BHT = context.probability().mean(dim=(2, 3))
        mean_BHT = mean_BHT.masked_fill(~context.allowed_BT[:, None], 0.0)
        score_BHT = torch.nn.functional.avg_pool1d(mean_BHT, POOL, stride=1, padding=POOL // 2)
        return best(context, score_BHT, self.config.budget)
