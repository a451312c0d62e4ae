"""The variant of mixed heads: one of eight KV heads reads all tokens, the others read sparsely."""

from collections.abc import Callable

import torch

from sfi_core.measure.kernel_bench import bytes_moved, gates
from sfi_core.measure.kernel_bench.data import LayerData, Selected, step_plan
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.decode_attention import decode_attention
from sfi_kernels.step_descriptor import FAST

DENSE_EVERY = 8


def mixed_heads_variant(
    settings: KernelSettings, data: LayerData, selected: Selected, retention: float, backend: str
) -> KernelVariant:
    """Make the variant; pack `selected` before the variant is called."""
    dense_BH = dense_heads(settings, data.length_B.device)
    call = _call(settings, data, selected, dense_BH, backend)
    start = settings.context - settings.recent
    index = gates.attended(selected.index_BHK, settings.sink, start, settings.context)
    operands = data.query_BHGD, data.key_BHTD, data.value_BHTD, settings.scale
    expected = gates.textbook(*operands).where(
        dense_BH[..., None, None] != 0, gates.textbook(*operands, index)
    )
    attended, dense = settings.attended(retention), int(dense_BH[0].sum())
    moved = bytes_moved.mixed_heads_bytes(settings, attended, dense)
    return KernelVariant("mixed_heads", retention, call, moved, lambda: expected.error(call()))


def dense_heads(settings: KernelSettings, device: torch.device) -> torch.Tensor:
    """Return the marks of dense heads, [B, H] int32: 1 for the first head of every eight."""
    head = torch.arange(settings.kv_heads, device=device)
    return (head % DENSE_EVERY == 0).int().expand(settings.batch, -1).contiguous()


def _call(
    settings: KernelSettings,
    data: LayerData,
    selected: Selected,
    dense_BH: torch.Tensor,
    backend: str,
) -> Callable[[], torch.Tensor]:
    rows = selected.key_BHSD.shape[2]
    plan = step_plan(settings, backend, dense_BH.device, mode=FAST, packed=rows, mixed=True)
    packed = selected.key_BHSD, selected.value_BHSD, selected.length_BH
    attend, query_BHG1D = decode_attention.on(backend), data.query_BHGD[:, :, :, None]

    def call() -> torch.Tensor:
        return attend(
            query_BHG1D, *packed, *data.paged, plan, scale=settings.scale, dense_BH=dense_BH
        ).out_BHGWE[:, :, :, 0]  # fmt: skip

    return call
