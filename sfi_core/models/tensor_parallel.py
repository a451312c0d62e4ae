"""transformers' tensor parallelism: loading a model that is split by heads."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from sfi_core.errors import UnsupportedModelError

SPLIT = "colwise"  # the style of a projection whose heads stay on their ranks


def parallel_options(config: Any, size: int, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return `from_pretrained`'s arguments, besides a device mesh, for a model split over `size` ranks.

    Raise `UnsupportedModelError` if the model's heads cannot be split.
    """
    if size == 1:
        return {}
    text = config.get_text_config(decoder=True)
    check_split(config, text.base_model_tp_plan or {}, size)
    whole = text.vocab_size % size
    plan = _plan_with_whole_head(config, trust_remote_code=trust_remote_code) if whole else "auto"
    return {"distributed_config": DistributedConfig(tp_plan=plan, tp_size=size)}


def check_split(config: Any, plan: dict[str, str], size: int) -> None:
    """Raise `UnsupportedModelError` unless a model's attention splits by heads into `size` equal parts."""
    name, text = config.model_type, config.get_text_config(decoder=True)
    if not plan:
        raise UnsupportedModelError(
            f"{name} must have a tensor-parallel plan in transformers to run on {size} ranks, got none"
        )
    if not any(style == SPLIT and "att" in module for module, style in plan.items()):
        raise UnsupportedModelError(
            f"{name} must split its attention by heads to run on {size} ranks; "
            "its tensor-parallel plan shows every rank all of them"
        )
    # every kind of heads there is: some architectures have other numbers in some layers
    for field, heads in text.to_dict().items():
        if field.endswith("heads") and isinstance(heads, int) and heads % size:
            raise UnsupportedModelError(f"{field} must be a multiple of the {size} ranks, got {heads}")


def _plan_with_whole_head(config: Any, *, trust_remote_code: bool) -> dict[str, str]:
    # the vocabulary does not split evenly, and transformers refuses to split it otherwise
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    # where tied, they split as one
    heads = twin.get_output_embeddings(), twin.get_input_embeddings()
    whole = {name for name, module in twin.named_modules() if module in heads}
    return {module: style for module, style in twin.tp_plan.items() if module not in whole}
