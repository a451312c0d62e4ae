"""Controls: `codescan` that chooses by a query predicted half a layer ahead, from the residual before the last MLP.

Layer l's query is q_proj(norm(x)) of the residual x after layer l - 1. Half a layer ahead, x is the residual after
layer l - 1's attention, before its MLP; a whole layer ahead, before its attention. Attention itself takes the true
query, and so does the basis. Layer 0 chooses as ever.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from sfi_core.hosts.transformers import known as sources
from sfi_core.policies.base import BatchContext, Policy
from sfi_core.policies.built_in.codescan import CodeScan
from sfi_kernels.choice import Choice
from sfi_kernels.code_scan import KEPT

LAST = 512  # the prompt's last tokens, which a map is learned from
RIDGE = 1e-2  # of the mean variance of the predicted queries


class Predictor:
    """Watches a model's layers; `half` and `whole` have the predicted queries of the layer that attends, [B, H, T, D].

    `map_HDD` turns a predicted query before its rotation into the true one, by least squares on the prompt's last
    tokens: those of all requests that were read together.
    """

    def __init__(self) -> None:
        self.layer = -1
        self.predicted: dict[str, torch.Tensor] = {}
        self._residual: dict[tuple[str, int], torch.Tensor] = {}
        self._map: dict[int, torch.Tensor] = {}
        self.cosine: dict[int, list[float]] = {}

    def watch(self, model: Any) -> None:
        """Put hooks on a model's layers."""
        layers = model.model.layers
        for index, layer in enumerate(layers):
            after = getattr(layer, "pre_feedforward_layernorm", None) or layer.post_attention_layernorm
            after.register_forward_pre_hook(partial(self._keep, "half", index))
            layer.input_layernorm.register_forward_pre_hook(partial(self._keep, "whole", index))
            layer.self_attn.register_forward_pre_hook(partial(self._predict, layers, index), with_kwargs=True)

    def _keep(self, place: str, index: int, _: Any, args: tuple[torch.Tensor]) -> None:
        self._residual[place, index] = args[0]

    def _predict(self, layers: Any, index: int, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer, self.predicted = index, {}
        if not index:
            return
        hidden = kwargs["hidden_states"]
        cos, sin = kwargs["position_embeddings"]
        turn = partial(_turned, attention, cos, sin)
        norm = layers[index].input_layernorm.forward  # without the hook
        half = _query(attention, norm(self._residual["half", index - 1]))
        if hidden.shape[1] > 1:
            self._learn(index, half[:, :, -LAST:], _query(attention, hidden)[:, :, -LAST:])
            return
        self.predicted = {
            "half": turn(half),
            "whole": turn(_query(attention, norm(self._residual["whole", index - 1]))),
            "mapped": turn(half @ self._map[index]),
        }

    def _learn(self, index: int, guess_BHTD: torch.Tensor, true_BHTD: torch.Tensor) -> None:
        guess_HND, true_HND = (x.transpose(0, 1).flatten(1, 2).double() for x in (guess_BHTD, true_BHTD))
        moment_HDD = guess_HND.mT @ guess_HND
        ridge_H = RIDGE * moment_HDD.diagonal(dim1=1, dim2=2).mean(1)
        moment_HDD += ridge_H[:, None, None] * torch.eye(moment_HDD.shape[1])
        # towards the identity: what the prompt does not say stays as it was predicted
        wanted_HDD = guess_HND.mT @ true_HND + ridge_H[:, None, None] * torch.eye(moment_HDD.shape[1])
        self._map[index] = torch.linalg.solve(moment_HDD, wanted_HDD).float()


def _query(attention: Any, normed_BTE: torch.Tensor) -> torch.Tensor:
    # [B, heads, T, D], before the rotation
    query = attention.q_proj(normed_BTE).unflatten(-1, (-1, attention.head_dim))
    return getattr(attention, "q_norm", torch.nn.Identity())(query).transpose(1, 2)


def _turned(attention: Any, cos: torch.Tensor, sin: torch.Tensor, query_BHTD: torch.Tensor) -> torch.Tensor:
    apply = sources.names_of(type(attention).forward)["apply_rotary_pos_emb"]
    turned: torch.Tensor = apply(query_BHTD, query_BHTD, cos, sin)[0]
    return turned


PREDICTOR = Predictor()


class HalfAhead(CodeScan):
    """`codescan` by a predicted query."""

    by: ClassVar[str] = "half"

    def choose(self, batch: BatchContext) -> Choice | None:
        """See `CodeScan`; the queries that the basis is learned from stay the true ones."""
        predicted, true_BHGD = PREDICTOR.predicted.get(self.by), batch.query_BHGD
        if predicted is None:
            return super().choose(batch)
        guess_BHGD = predicted.view_as(true_BHGD)
        cosine = torch.nn.functional.cosine_similarity(guess_BHGD, true_BHGD, dim=-1).mean()
        PREDICTOR.cosine.setdefault(PREDICTOR.layer, []).append(float(cosine))
        choice = super().choose(replace(batch, query_BHGD=guess_BHGD))
        for row in batch.descriptor.fast:
            length = int(batch.descriptor.length_B[row])
            batch.kept.recent_BHXGD[row, :, (length - 1) % KEPT] = true_BHGD[row]
        return choice


class Mapped(HalfAhead):
    """By the query predicted half a layer ahead, corrected by the prompt's own map."""

    by = "mapped"


class LayerAhead(HalfAhead):
    """By the query predicted a whole layer ahead."""

    by = "whole"


AHEAD: dict[str, type[Policy]] = {
    "codescan-half-ahead": HalfAhead, "codescan-half-ahead-mapped": Mapped, "codescan-layer-ahead": LayerAhead,
}  # fmt: skip
