"""A model in numbers, for traces and the byte model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from sfi_core.distributed.ranks import local, ranks_of
from sfi_core.models.blocks import Blocks
from sfi_core.models.linear import BlockLayer
from sfi_core.models.load import BUNDLED
from sfi_core.models.rotation import most_positions
from sfi_core.state.layer_pages import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """The bytes of a model's weights, by use; of a split model, this rank's part.

    Shared weights count once in `total_bytes`. `unread_bytes` is the input embedding, or 0 where a step reads it as the
    output matrix. `routed_bytes` are the experts of all layers; of a layer's `experts`, a token goes through `active`.
    """

    total_bytes: int
    embedding_bytes: int
    unread_bytes: int
    routed_bytes: int
    experts: int
    active: int

    @classmethod
    def of(cls, model: Any) -> Self:
        """Take the numbers from a model of transformers, on any device, the meta device included."""
        config = model.config.get_text_config(decoder=True)
        packed = {  # shared weights count once
            id(module.blocks): (f"{name}.weight", module.blocks.nbytes)
            for name, module in model.named_modules()
            if isinstance(module, BlockLayer)
        }
        weights = dict(packed.values()) | {name: local(weight).nbytes for name, weight in model.named_parameters()}
        embedding: Any
        embedding, head = (
            module.blocks if isinstance(module, BlockLayer) else getattr(module, "weight", None)
            for module in (model.get_input_embeddings(), model.get_output_embeddings())
        )
        embedding_bytes = embedding.nbytes if isinstance(embedding, Blocks) else local(embedding).nbytes
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        return cls(
            total_bytes=sum(weights.values()),
            embedding_bytes=embedding_bytes,
            unread_bytes=0 if head is embedding else embedding_bytes,
            routed_bytes=sum(size for name, size in weights.items() if ".experts." in name),
            experts=experts or getattr(config, "n_routed_experts", None) or 0,
            active=getattr(config, "num_experts_per_tok", None) or 0,
        )

    def read(self, batch: int = 1) -> int:
        """Return a step's bytes for `batch` tokens; they read E (1 - (1 - k/E)^B) of E experts on average, k active."""
        share = 1.0
        if self.experts and self.active:
            share = 1 - (1 - self.active / self.experts) ** batch
        return self.total_bytes - self.unread_bytes - round((1 - share) * self.routed_bytes)


def describe_model(model: Any, shapes: Sequence[LayerShape]) -> dict[str, Any]:
    """Describe a model, of layers with `shapes`, in plain values.

    `weight_bytes` are the weights that one token reads: without the rows of the input embedding that belong
    to other tokens, and with the active experts of a mixture only. `layers` has each layer's heads, widths,
    bytes of a number, and window; a layer with states their bytes, one that reads another's keys its `owner`. Of a
    model that is split over ranks, heads and bytes are this rank's, and `tensor_parallel` names the rank.
    """
    config, ranks = model.config.get_text_config(decoder=True), ranks_of(model)
    name = config.name_or_path or model.config.name_or_path
    weights = ModelWeights.of(model)
    parallel = {"rank": ranks.number, "ranks": ranks.size}
    return {
        "name": "bundled" if name == str(BUNDLED) else name,
        "architecture": type(model).__name__,
        "model_type": config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": [
            {
                "layer": layer, "heads": shape.heads, "key_width": shape.key_width,
                "value_width": shape.value_width, "itemsize": shape.itemsize, "window": shape.window,
                **{name: value for name in ("state_bytes", "owner") if (value := getattr(shape, name))},
            }
            for layer, shape in enumerate(shapes)
        ],
        "query_heads": config.num_attention_heads // ranks.size,
        "weight_bytes": weights.read(),
        "embedding_bytes": weights.embedding_bytes,
        "max_positions": most_positions(config),
        "vocabulary": config.vocab_size,
        **({"tensor_parallel": parallel} if ranks.size > 1 else {}),
    }  # fmt: skip
