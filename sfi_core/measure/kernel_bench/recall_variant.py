"""The variant of recall: the device has most selected rows, the host's pages have the others."""

from functools import partial

import torch

from sfi_core.measure.kernel_bench import bytes_moved, gates
from sfi_core.measure.kernel_bench.data import LayerData, Selected
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.pack import pack
from sfi_kernels.recall import recall

FETCHED_EVERY = 4  # every fourth selected row comes from the host


def recall_variant(
    settings: KernelSettings, data: LayerData, selected: Selected, retention: float, backend: str
) -> KernelVariant:
    """Make the variant: the old segment has the sinks and three of four selected rows.

    Paper gap: the share of rows that stay selected depends on the model; we take three of four.
    """
    pages = host_pages(data)
    request = torch.arange(settings.batch, dtype=torch.int32, device=data.length_B.device)
    sink = torch.full_like(request, settings.sink)
    old = selected.empty_like()
    kept = _without_each_fourth(selected.index_BHK)
    pack.on(backend)(*data.paged, request, kept, sink, *old.segment)
    into, fetched = selected.empty_like(), torch.empty_like(selected.length_BH)
    call = partial(
        recall.on(backend), *pages, data.block_table_BP, request, selected.index_BHK, sink,
        *old.segment, *into.segment, fetched,
    )  # fmt: skip
    index = gates.attended(selected.index_BHK, settings.sink, 0, 0)
    missing = torch.full_like(fetched, fetched_rows(selected.index_BHK.shape[2]))

    def error() -> float:
        into.poison()
        call()
        wrong = gates.pack_error(into.segment, data.key_BHTD, data.value_BHTD, index)
        return max(wrong, gates.same(fetched, missing))

    moved = bytes_moved.recall_bytes(settings, index.shape[2], index.shape[2] - int(missing[0, 0]))
    return KernelVariant("recall", retention, call, moved, error)


def fetched_rows(budget: int) -> int:
    """Return how many rows of a KV head come from the host."""
    return -(-budget // FETCHED_EVERY)


def host_pages(data: LayerData) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the pages to the host in FreeKV's layout, [P, H, 2, N, D]; pinned for a CUDA device."""
    key_PHND, value_PHNE, _ = data.paged
    P, H, N, D = key_PHND.shape
    pages = torch.empty(P, H, 2, N, D, dtype=key_PHND.dtype, pin_memory=key_PHND.is_cuda)
    pages[:, :, 0], pages[:, :, 1] = key_PHND, value_PHNE
    return pages[:, :, 0], pages[:, :, 1]


def _without_each_fourth(index_BHK: torch.Tensor) -> torch.Tensor:
    K = index_BHK.shape[2]
    kept = index_BHK[..., torch.arange(K, device=index_BHK.device) % FETCHED_EVERY != 0]
    return torch.nn.functional.pad(kept, (0, K - kept.shape[2]), value=-1)
