"""A model in numbers, for traces and the byte model; and what its rotary embedding (RoPE) says.

RoPE says how long a text may be, and whether a pass rotates its tokens by its longest text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from sfi_core.distributed.ranks import local, ranks_of
from sfi_core.errors import ConfigError
from sfi_core.models.blocks import Blocks
from sfi_core.models.linear import BlockLayer
from sfi_core.models.load import BUNDLED
from sfi_core.state.layer_pages import LayerShape

EXTENDED = (None, "default", "llama3", "longrope")  # kinds whose factor leaves the config's length as it is


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
        """Return the bytes that a step reads to decode one token of each of `batch` requests.

        Of E experts with k active ones, B tokens at random read E (1 - (1 - k/E)^B) distinct ones on average.
        """
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


def pass_rotation(config: Any) -> str:
    """Return the kind of RoPE that rotates all tokens of a pass by its largest position; else "".

    With transformers' `longrope` and `dynamic` a token's keys depend on the pass that read the token: pieces
    of another size, or a longer request beside it, give other keys, and other tokens.
    """
    kinds = (str(rope.get("rope_type")) for rope in _ropes(config.get_text_config(decoder=True)))
    return next((kind for kind in kinds if kind == "longrope" or "dynamic" in kind), "")


def most_positions(config: Any) -> int | None:
    """Return the most tokens of a text, prompt and answer; None where the config names no limit.

    A factor of scaled RoPE (yarn, linear, dynamic) extends `max_position_embeddings`, or what a yarn config names as
    the original length; with llama3 and longrope, and in Gemma 3, `max_position_embeddings` is the extended length
    already. vLLM has the same rule, but for a yarn config whose `max_position_embeddings` is longer yet: that counts.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if not limit:
        return None
    longest = limit
    for rope in _ropes(text):
        kind, factor = rope.get("rope_type"), rope.get("factor")
        if factor and kind not in EXTENDED and "gemma3" not in text.model_type:
            original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
            longest = max(longest, int(factor * (original or limit)))
    return int(longest)


def _ropes(text: Any) -> Iterator[dict[str, Any]]:
    # the parameters of the model, or by kind of layer
    parameters = getattr(text, "rope_parameters", None) or {}
    return (rope for rope in (parameters, *parameters.values()) if isinstance(rope, dict))


def check_rotation(config: Any) -> None:
    """Raise `ConfigError` where tokens depend on how a text is cut into passes: no run is lossless."""
    if kind := pass_rotation(config):
        raise ConfigError(
            f"lossless must be off with RoPE of the kind {kind}, which rotates a pass by its largest position"
        )
