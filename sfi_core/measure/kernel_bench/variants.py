"""The variants that the benchmark runs: the ops on one backend, and their rivals."""

from collections.abc import Callable, Iterator
from typing import Any

from sfi_core.measure.kernel_bench.attention_ops import dense, fast, mixed_heads, verify
from sfi_core.measure.kernel_bench.cache_ops import appended, best, packed, recalled, scored
from sfi_core.measure.kernel_bench.codescan_op import codescan
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.fused_ops import gate, norm, rotation
from sfi_core.measure.kernel_bench.prompt_ops import prompt
from sfi_core.measure.kernel_bench.settings import PACKED_OPS
from sfi_core.measure.kernel_bench.variant import KernelVariant, checked

Make = Callable[[LayerData, Any], Iterator[KernelVariant]]
# by title, the ops that take turns, and what makes the variants of each for a retention
GROUPS: dict[str, dict[str, Make]] = {
    "Attention of a step": {"dense": dense, "fast": fast},
    "Attention of verifications and of mixed heads": {"verify": verify, "mixed_heads": mixed_heads},
    "Selection of a slow step": {"selector": scored, "top_k": best, "pack": packed},
    "A step of CodeScan": {"codescan": codescan},
    "The cache": {"append": appended, "recall": recalled},
    "Attention of a prompt": {"prompt": prompt},
    "The rest of a layer": {"rms_norm": norm, "rotary": rotation, "silu_mul": gate},
}


def groups(layer: LayerData) -> Iterator[tuple[str, Iterator[KernelVariant]]]:
    """Yield each title with the checked variants of the settings' ops; dense attention is always among them."""
    for title, ops in GROUPS.items():
        asked = {op: make for op, make in ops.items() if op == "dense" or op in layer.settings.ops}
        if asked:
            yield title, _variants(layer, asked)


def _variants(layer: LayerData, ops: dict[str, Make]) -> Iterator[KernelVariant]:
    for op, make in ops.items():
        retentions: tuple[float | None, ...] = (1.0,) if op in ("dense", "verify") else (None,)
        if op in PACKED_OPS or op == "top_k":
            retentions = layer.settings.retentions
        for retention in retentions:
            yield from checked(op, retention, make(layer, retention))
