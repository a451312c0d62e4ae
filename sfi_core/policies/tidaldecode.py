"""TidalDecode: a few dense layers choose for those after them (Yang et al., 2024, arXiv:2410.05076).

Differs from the authors' code in that the query heads of a KV head share a choice, by their mean. As there,
the choosing layers and those before the first are dense. Paper gap: the correction layer is calibrated by
model; without `select_layers` it is the one at the depth of their 13 of 32.
"""

from collections.abc import Sequence

import torch

from sfi_core.errors import ConfigError
from sfi_core.policies.base import Policy, Rule, Selection, StepPlan
from sfi_core.policies.context import LayerContext, StepContext
from sfi_core.policies.shared import always_fast, best, stacked, window_probability
from sfi_core.settings.config import SfiConfig

FIRST, CORRECTION, DEPTH = 2, 13, 32


class TidalDecode(Policy):
    """At every step the choosing layers take their top K; the layers after them read that."""

    selects_before = True
    selects_after = True

    def __init__(self, config: SfiConfig, trigger: Rule, layers: Sequence[int] = ()) -> None:
        self.chooses = choosing_layers(config, layers)
        first = min(self.chooses, default=0)
        dense = {*config.dense_layers, *self.chooses, *(layer for layer in layers if layer < first)}
        super().__init__(config.replace(dense_layers=tuple(sorted(dense))), trigger, layers)

    @classmethod
    def adapt(cls, config: SfiConfig) -> SfiConfig:
        """Slide the recent window: every step selects."""
        return config.replace(recent_mode="sliding")

    def plan(self, context: StepContext) -> StepPlan:
        """Attend sparsely after the prompt, but in those layers."""
        return always_fast(context)

    def selects_in(self, layer: int) -> bool:
        """Only the choosing layers select."""
        return layer in self.chooses

    def select_after(self, context: LayerContext) -> None:
        """Note the top K of a choosing layer for the layers to come."""
        selection = best(context, window_probability(context), self.config.budget)
        for shared, index_HK in zip(context.shared, selection.index_BHK, strict=True):
            shared["index"] = index_HK

    def select_before(self, context: LayerContext) -> Selection:
        """Read what the last choosing layer chose; nothing while there is nothing to choose from."""
        H = context.key_norm_BHT.shape[1]
        none_HK = context.key_norm_BHT.new_empty(H, 0, dtype=torch.int32)
        chosen = [shared.get("index", none_HK) for shared in context.shared]
        if any(len(index_HK) != H for index_HK in chosen):
            raise ConfigError(
                f"tidaldecode needs as many KV heads in every layer, got {H} in layer {context.layer}"
            )
        return Selection(stacked(chosen))


def choosing_layers(config: SfiConfig, layers: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that choose: those asked for, or layer 2 and the correction layer.

    In a model too shallow for that, the last layer reads what one before it chose.

    Raises:
        ConfigError: A layer was asked for that is no full-attention layer of the model.
    """
    asked = config.baseline.select_layers
    if asked is not None:
        if unknown := sorted(set(asked) - set(layers)):
            raise ConfigError(f"select_layers must be among {list(layers)}, got {unknown}")
        return tuple(sorted(set(asked)))
    last = max(0, len(layers) - 2)
    ranks = {min(FIRST, last), min(max(FIRST, round(CORRECTION * len(layers) / DEPTH)), last)}
    return tuple(layers[rank] for rank in sorted(ranks) if layers)
