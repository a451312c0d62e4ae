"""The sizes of the smoke run: those of a GPU, and tiny ones for a CPU."""

from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.measure.bench.architectures import QWEN3
from sfi_kernels.attention_tile import QueryTile

SMALL_QWEN3 = {
    **QWEN3, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "context": 300, "batch": 2, "recent": 20, "retentions": (0.5,)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """How large everything is; the defaults are for a GPU of 80 GB or more.

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
        tiles: Tiles of the prompt kernel: ours, and what else compiles without spills.
        layer: A layer's heads, KV heads and head dimension.
        dtype: The dtype of the timed model and layer.
        repeats: Timed calls of a kernel.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    graphs: bool
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    widths: tuple[int, ...] = (128, 64)
    shapes: tuple[dict[str, Any], ...] = (SMALL, {"context": 16384, "batch": 4})
    tokens: int = 64
    small: dict[str, Any] = field(default_factory=lambda: SMALL_QWEN3)
    large: dict[str, Any] | None = None
    context: int = 8192
    batches: tuple[int, ...] = (1, 16)
    steps: int = 44
    replays: int = 50
    eager_steps: int = 10
    prompts: tuple[int, ...] = (8192, 32768)
    # (64, 8) repeats products
    tiles: tuple[QueryTile, ...] = (
        QueryTile(128, 8, 64, 5),
        QueryTile(64, 4, 64, 5),
        QueryTile(64, 4, 64, 3),
        QueryTile(64, 8, 64, 5),
    )
    layer: tuple[int, int, int] = (32, 8, 128)
    dtype: str = "bfloat16"
    repeats: int = 20

    @property
    def dry(self) -> bool:
        """Whether a CPU stands in for the GPU."""
        return self.device.type == "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the timed model and layer."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def dry(*, graphs: bool) -> Plan:
    """Return tiny sizes for Triton's interpreter, in which float32 and float16 come out right."""
    model = {**SMALL_QWEN3, "num_hidden_layers": 2}
    return Plan(
        device=torch.device("cpu"), graphs=graphs, dtypes=("float32",), widths=(16,),
        shapes=({**SMALL, "context": 150},), tokens=6, small=model, large=model, context=300, batches=(1, 2),
        steps=6, replays=1, eager_steps=2, prompts=(70,), tiles=(QueryTile(32, 4, 32, 3),),
        layer=(4, 2, 16), dtype="float32", repeats=1,
    )  # fmt: skip
