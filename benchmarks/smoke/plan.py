"""The sizes of the smoke run: those of a GPU, and tiny ones for a CPU."""

from dataclasses import dataclass
from typing import Any

import torch

from sfi_core.measure.bench.architectures import QWEN3
from sfi_kernels.dense_attention.prompt_tile import PromptTile

SMALL_QWEN3 = {
    **QWEN3, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "context": 300, "batch": 2, "recent": 20, "retentions": (0.5,),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """How large everything is.

    Attributes:
        device: Where it runs.
        graphs: Whether steps are recorded.
        dtypes: Names of the dtypes that ops are checked in.
        widths: Numbers of a head that ops are checked at.
        shapes: Settings of the kernel benchmark that ops are checked at.
        tokens: Tokens that the tiny model generates.
        small: The tiny model's config.
        large: The timed model's config; None for Qwen3-4B.
        context: Cached tokens of the timed model's requests.
        batches: Its batches.
        steps: Its decoding steps; each request is slow once in twenty.
        replays: Timed replays of a step.
        eager_steps: Steps without graphs.
        prompts: Lengths of a layer's prompt.
        tiles: Tiles of the prompt kernel.
        layer: A layer's heads, KV heads and head dimension, for prompts and the split kernel.
        dtype: The dtype of the timed model and layers.
        cached: Cached tokens that the split kernel reads.
        selected: Tokens that its fast step reads.
        stages: Depths of its pipeline.
        repeats: Timed calls of a kernel.
    """

    device: torch.device
    graphs: bool
    dtypes: tuple[str, ...]
    widths: tuple[int, ...]
    shapes: tuple[dict[str, Any], ...]
    tokens: int
    small: dict[str, Any]
    large: dict[str, Any] | None
    context: int
    batches: tuple[int, ...]
    steps: int
    replays: int
    eager_steps: int
    prompts: tuple[int, ...]
    tiles: tuple[PromptTile, ...]
    layer: tuple[int, int, int]
    dtype: str
    cached: int
    selected: int
    stages: tuple[int, ...]
    repeats: int

    @property
    def dry(self) -> bool:
        """Whether a CPU stands in for the GPU."""
        return self.device.type == "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the timed model and layers."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def real(*, graphs: bool) -> Plan:
    """Return the sizes of a GPU of 80 GB or more."""
    return Plan(
        device=torch.device("cuda"),
        graphs=graphs,
        dtypes=("bfloat16", "float32"),
        widths=(128, 64),
        shapes=(SMALL, {"context": 16384, "batch": 4}),
        tokens=64,
        small=SMALL_QWEN3,
        large=None,
        context=8192,
        batches=(1, 16),
        steps=44,
        replays=50,
        eager_steps=10,
        prompts=(8192, 32768),
        # ours, and what else compiles without spills; (64, 8) repeats products
        tiles=(
            PromptTile(128, 8, 64, 5),
            PromptTile(64, 4, 64, 5),
            PromptTile(64, 4, 64, 3),
            PromptTile(64, 8, 64, 5),
        ),
        layer=(32, 8, 128),
        dtype="bfloat16",
        cached=16384,
        selected=4 + 2048 + 256,
        stages=(3, 4),
        repeats=20,
    )


def dry(*, graphs: bool) -> Plan:
    """Return tiny sizes for Triton's interpreter, in which float32 and float16 come out right."""
    model = {**SMALL_QWEN3, "num_hidden_layers": 2}
    return Plan(
        device=torch.device("cpu"),
        graphs=graphs,
        dtypes=("float32",),
        widths=(16,),
        shapes=({**SMALL, "context": 150},),
        tokens=6,
        small=model,
        large=model,
        context=300,
        batches=(1, 2),
        steps=6,
        replays=1,
        eager_steps=2,
        prompts=(70,),
        tiles=(PromptTile(32, 4, 32, 3),),
        layer=(4, 2, 16),
        dtype="float32",
        cached=300,
        selected=4 + 16 + 256,
        stages=(3, 4),
        repeats=1,
    )
