"""SyncKV: a representative head selects for all heads of its cluster.

Every `stride` steps the representatives (R-heads) attend densely and select the dynamic set of their cluster
(anticipation); between these steps the other heads (NR-heads) read that set (suspension). Heads are KV heads;
a KV head's attention is the maximum over its query heads (Appendix B.1).

Paper gap: NR-heads read the sets of their own cluster (Sec. 4.4); Algorithm 1, line 23, unites all clusters'.
Paper gap: the dynamic set excludes the static set, so that both together have `budget` positions.
Paper gap: if the prompt has fewer candidates than the static share, the dynamic set gets the rest.
Paper gap: sink and recent tokens are kept as in every policy here; the paper does not say how tokens that
were generated since the last anticipation are read.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import torch

from sfi_core.errors import ConfigError
from sfi_core.policies.base import Companion, LayerContext, Policy, Selection
from sfi_core.policies.head_clusters import HeadClusters
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.top_k import top_k

EVEN = "even"  # `synckv.heads` without a file: each layer's heads in groups of `NEIGHBORS`
NEIGHBORS = 4
LAST = torch.iinfo(torch.int32).max


class SyncKV(Companion, Policy):
    """Every `stride` steps representatives select; the other heads read the static and the dynamic set.

    `clusters` are the head clusters of the file, None under `EVEN`; the dynamic set has `dynamic` positions.
    """

    fills = True
    offloads = True
    fixed: ClassVar = {"recent_mode": "anchored", "window_prefill": 1}  # Eq. 3: the last query

    def __init__(self, config: SfiConfig, trigger: Trigger, layers: Sequence[int] = ()) -> None:
        """See `Policy`; reads the file of head clusters.

        Raise `ConfigError` if no file is named, `InputError` for one that cannot be read or is damaged.
        """
        super().__init__(config, trigger, layers)
        settings = self.config.synckv
        self.most_fast_steps = settings.stride
        if settings.heads is None:
            raise ConfigError(
                "synckv.heads must be a file of head clusters, got none; make one with `sfi tune heads`, or "
                f"set synckv.heads={EVEN}"
            )
        self.clusters = None if settings.heads == EVEN else HeadClusters.load(Path(settings.heads))
        # a Fraction, because 1 - 0.9 < 0.1 in floating point
        share = 1 - Fraction(str(settings.static))
        self.dynamic = int(share * self.config.budget)  # k_dyn of Eq. 6

    def plan(self, requests: Sequence[RequestState]) -> list[str]:
        """Anticipate at every step t with t mod m = 0 (SyncKV, Algorithm 1, line 26)."""
        stride = self.config.synckv.stride
        return ["" if (state.step + 1) % stride else "anticipation" for state in requests]

    def dense_heads(self, state: RequestState, layer: int, heads: int) -> Sequence[int]:
        """Return the representatives (SyncKV, Algorithm 1, line 22); none while suspended and `sparse`."""
        if state.slow or self.config.synckv.suspension == "dense":
            return self._representatives(layer, heads)
        return ()

    def leaders(self, layer: int, heads: int) -> tuple[int, ...]:
        """Return the representative of each KV head of a layer; a representative's is itself."""
        if self.clusters is not None:
            return self.clusters.leader_of(layer)
        count = max(1, heads // NEIGHBORS)
        return tuple(-(-(head * count // heads) * heads // count) for head in range(heads))

    def resident(self, layer: int, heads: int) -> Sequence[int]:
        """Keep the representatives' keys and values on the device too (Sec. 4.2)."""
        return super().resident(layer, heads) or self._representatives(layer, heads)

    def select_after(self, context: LayerContext) -> Selection:
        """Select the dynamic set by the representatives (SyncKV, Eq. 6); at step 0 both sets."""
        leaders = self.leaders(context.layer, context.key_norm_BHT.shape[1])
        chosen = sorted(set(leaders))
        score_BRT = context.probability(chosen).amax(dim=(2, 3))  # Eq. 5; the other heads' logits are invalid
        score_BRT = score_BRT.masked_fill(~context.allowed_BT[:, None], MASKED_SCORE)
        rows = [self._select(context, at, score_RT) for at, score_RT in enumerate(score_BRT.unbind(0))]
        of_leader = dict(zip(chosen, torch.stack(rows, 1), strict=True))
        return Selection(torch.stack([of_leader[leader] for leader in leaders], 1))

    def _representatives(self, layer: int, heads: int) -> list[int]:
        return sorted(set(self.leaders(layer, heads)))

    def _select(self, context: LayerContext, at: int, score_RT: torch.Tensor) -> torch.Tensor:
        note, K = context.notes[at], min(self.config.budget, score_RT.shape[1])
        best: Callable[[torch.Tensor, int], torch.Tensor] = top_k.on(context.backend)
        state = context.states[at]
        if state.step == 0:
            first_RK = best(score_RT[None], K)[0]
            candidates = state.recent_start - state.sink(self.config.sink)
            static = min(self.config.budget - self.dynamic, candidates)
            note["static"] = best(score_RT[None], static)[0] if static else first_RK[:, :0]
            return first_RK
        nothing_RK = score_RT.new_empty(len(score_RT), 0, dtype=torch.int32)
        static_RK: torch.Tensor = note.get("static", nothing_RK).long()
        room = K - static_RK.shape[1]
        if room <= 0:
            return static_RK.int()
        T = score_RT.shape[1]
        spare_RT = torch.nn.functional.pad(score_RT, (0, 1))  # index -1 lands in the added column
        spare_RT = spare_RT.scatter(1, static_RK.to(spare_RT.device) % (T + 1), MASKED_SCORE)
        dynamic_RK = best(spare_RT[None, :, :T].contiguous(), room)[0]
        return _united(static_RK.to(dynamic_RK), dynamic_RK)


def _united(first_RK: torch.Tensor, second_RK: torch.Tensor) -> torch.Tensor:
    # joins two disjoint sets: ascending, padded with -1 at the end
    both_RK = torch.cat([first_RK, second_RK], 1)
    both_RK = both_RK.masked_fill(both_RK < 0, LAST).sort(1).values
    return both_RK.masked_fill(both_RK == LAST, -1)
