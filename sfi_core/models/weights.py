"""The bytes of a model's weights, and those that a decoding step reads."""

from dataclasses import dataclass
from typing import Any, Self

from sfi_core.distributed.ranks import local
from sfi_core.models.linear import PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """The bytes of a model's weights, by use; of a split model, this rank's part.

    Shared weights count once in `total_bytes`. `unread_bytes` is the input embedding, or 0 where it is the
    output matrix too, which a step reads. `routed_bytes` are the experts of mixtures, all layers together; of
    a layer's `experts`, 0 without a mixture, a token goes through `active` ones.
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
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings()
        packed = {
            f"{name}.weight": module.packed_bytes
            for name, module in model.named_modules()
            if isinstance(module, PackedLinear)
        }
        tied = head is not None and not isinstance(head, PackedLinear) and head.weight is embedding
        embedding_bytes = local(embedding).numel() * embedding.itemsize
        weights = packed | {  # shared parameters come once
            name: local(weight).numel() * weight.itemsize for name, weight in model.named_parameters()
        }
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        return cls(
            total_bytes=sum(weights.values()),
            embedding_bytes=embedding_bytes,
            unread_bytes=0 if tied else embedding_bytes,
            routed_bytes=sum(size for name, size in weights.items() if ".experts." in name),
            experts=experts or getattr(config, "n_routed_experts", None) or 0,
            active=getattr(config, "num_experts_per_tok", None) or 0,
        )

    def read(self, batch: int = 1) -> int:
        """Return the bytes that a step reads to decode one token of each of `batch` requests.

        Of E experts with k active ones, B tokens read E (1 - (1 - k/E)^B) distinct experts, the expected
        number where every token goes to k experts at random.
        """
        share = 1.0
        if self.experts and self.active:
            share = 1 - (1 - self.active / self.experts) ** batch
        return self.total_bytes - self.unread_bytes - round((1 - share) * self.routed_bytes)
