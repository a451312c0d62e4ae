"""A model in numbers, for traces and the byte model."""

from collections.abc import Sequence
from typing import Any

from sfi_core.distributed.ranks import ranks_of
from sfi_core.models.load import BUNDLED
from sfi_core.models.weights import ModelWeights
from sfi_core.state.layer_shape import LayerShape


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
        "max_positions": getattr(config, "max_position_embeddings", None),
        "vocabulary": config.vocab_size,
        **({"tensor_parallel": parallel} if ranks.size > 1 else {}),
    }  # fmt: skip
