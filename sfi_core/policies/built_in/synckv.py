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

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sfi_core.errors import ConfigError, InputError
from sfi_core.machine.text import printable
from sfi_core.policies.base import Companion, Evidence, EvidencePolicy, Kept, LayerContext, Selection
from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.top_k import top_k

EVEN = "even"  # `synckv.heads` without a file: each layer's heads in groups of `NEIGHBORS`
NEIGHBORS = 4
STATIC_SCORE = 2.0  # above every probability: the static set is selected first
SHOWN = 12  # characters of a digest in a message


class LayerClusters(BaseModel):
    """The cluster of each KV head of a layer, and the representative KV head of each cluster."""

    model_config = ConfigDict(strict=True, frozen=True)
    cluster_of: tuple[int, ...]
    representatives: tuple[int, ...]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        count = len(self.representatives)
        if set(self.cluster_of) != set(range(count)):
            raise ValueError(f"cluster_of must use each number from 0 to {count - 1}, got {list(self.cluster_of)}")
        for cluster, head in enumerate(self.representatives):
            if not 0 <= head < len(self.cluster_of) or self.cluster_of[head] != cluster:
                raise ValueError(
                    f"representatives must be in their own clusters, got head {head} for cluster {cluster}"
                )
        return self


class HeadClusters(BaseModel):
    """The clusters of KV heads of each layer.

    `digest` is the checkpoint's, or its commit on the hub, "" if unknown; `model` its name for messages; `made_from`
    says how the similarity was measured, in plain values.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    format: Literal[1] = 1
    model: str = ""
    digest: str
    layers: dict[Annotated[int, Field(ge=0)], LayerClusters] = Field(min_length=1)
    made_from: dict[str, Any] = {}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a head file; raises `InputError` if it cannot be read, is damaged or of another format."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise InputError(f"head file {path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            rule = first["msg"].removeprefix("Value error, ")
            raise InputError(f"head file {path} is damaged: {printable(where)}: {printable(rule)}") from error

    def text(self) -> str:
        """Return the file's text."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"

    def leader_of(self, layer: int) -> tuple[int, ...]:
        """Return the representative of each KV head of a layer; a representative's is itself."""
        clusters = self.layers[layer]
        return tuple(clusters.representatives[cluster] for cluster in clusters.cluster_of)

    def check(self, heads_by_layer: Mapping[int, int], digest: str) -> None:
        """Raise `ConfigError` for another checkpoint (by digest, "" if unknown), full-attention layers or KV heads."""
        whose = f"head clusters of {self.model or 'a model without a name'}"
        if self.digest and digest and self.digest != digest:
            raise ConfigError(
                f"{whose} must be of the checkpoint that runs, {digest[:SHOWN]}, "
                f"got {self.digest[:SHOWN]}; make them with sfi tune heads"
            )
        clustered = {layer: len(clusters.cluster_of) for layer, clusters in self.layers.items()}
        odd = sorted(layer for layer, _ in clustered.items() ^ heads_by_layer.items())
        if odd:
            layer, heads = odd[0], heads_by_layer.get(odd[0], 0)
            got = clustered.get(layer, 0)
            raise ConfigError(f"{whose} must have the model's {heads} KV heads in layer {layer}, got {got}")


class StaticSets(Kept):
    """The static sets of a layer's representatives, [B, R, K] int32, ascending, padded with -1."""

    def rewind(self, row: int, length: int) -> None:
        """Drop positions that are gone."""
        static_RK = self.parts[0][row]
        static_RK.masked_fill_(static_RK >= length, -1)


class SyncKV(Companion, EvidencePolicy):
    """Every `stride` steps representatives select; the other heads read the static and the dynamic set.

    `clusters` are the head clusters of the file, None under `EVEN`; the dynamic set has `dynamic` positions.
    """

    fills = offloads = True
    fixed: ClassVar = {"recent_mode": "anchored", "window_prefill": 1}  # Eq. 3: the last query

    def __init__(self, config: SfiConfig, trigger: Trigger, layers: Sequence[int] = ()) -> None:
        """See `Policy`; raise `ConfigError` without a file of head clusters, and as `HeadClusters.load`."""
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

    def dense_heads(self, layer: int, heads: int, *, slow: bool) -> Sequence[int]:
        """Return the representatives (SyncKV, Algorithm 1, line 22); none while suspended and `sparse`."""
        if slow or self.config.synckv.suspension == "dense":
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

    def keeps(
        self, rows: int, group: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, capacity: int
    ) -> StaticSets:
        """See `Companion`."""
        shape = rows, key_PHND.shape[1], self.config.budget - self.dynamic
        return StaticSets((key_PHND.new_full(shape, -1, dtype=torch.int32),))

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """Count the static sets."""
        return layer.heads * (self.config.budget - self.dynamic) * torch.int32.itemsize

    def select_after(self, context: Evidence) -> Selection:
        """Select the dynamic set by the representatives (SyncKV, Eq. 6); at the prompt's end both sets."""
        leaders = self.leaders(context.layer, context.key_norm_BHT.shape[1])
        chosen = sorted(set(leaders))
        score_BRT = context.probability(chosen).amax(dim=(2, 3))  # Eq. 5; the other heads' logits are invalid
        score_BRT = score_BRT.masked_fill(~context.allowed_BT[:, None], MASKED_SCORE)
        if isinstance(context, LayerContext):
            self._keep_static(context, score_BRT)
        else:
            score_BRT = self._with_static(context, score_BRT)
        index_BRK = top_k.on(context.backend)(score_BRT, self.config.budget)
        of_leader = dict(zip(chosen, index_BRK.unbind(1), strict=True))
        return Selection(torch.stack([of_leader[leader] for leader in leaders], 1))

    def _representatives(self, layer: int, heads: int) -> list[int]:
        return sorted(set(self.leaders(layer, heads)))

    def _keep_static(self, context: LayerContext, score_BRT: torch.Tensor) -> None:
        # of a prompt: the best static share of its candidates
        for kept, score_RT in zip(context.kept, score_BRT, strict=True):
            static_RK = kept.parts[0][0, : len(score_RT)].fill_(-1)
            if room := static_RK.shape[1]:
                best_RK = top_k.on(context.backend)(score_RT[None], room)[0]
                static_RK[:, : best_RK.shape[1]] = best_RK

    def _with_static(self, context: Evidence, score_BRT: torch.Tensor) -> torch.Tensor:
        # scores by which the static set comes first
        assert context.request_B is not None, "the engine says which rows"
        R, T = score_BRT.shape[1:]
        (all_BRK,) = context.all_kept.parts
        static_BRK = all_BRK[context.request_B.clamp_min(0).long(), :R].long()
        spare_BRT = torch.nn.functional.pad(score_BRT, (0, 1))  # index -1 lands in the added column
        spare_BRT = spare_BRT.scatter(2, static_BRK % (T + 1), STATIC_SCORE)
        return spare_BRT[..., :T].contiguous()
