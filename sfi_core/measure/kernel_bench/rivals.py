"""Dense attention of other projects."""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import torch
from torch.nn.functional import scaled_dot_product_attention

from sfi_core.machine.private import operators
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.variant import reason

FLASHINFER_WORKSPACE = 256 << 20  # bytes
SDPA, SOFTMAX = "_scaled_dot_product_", {"_softmax", "_safe_softmax"}
Rival = tuple[str, str | None, Callable[[], torch.Tensor]]


def rivals(settings: KernelSettings, data: LayerData, notes: list[str]) -> Iterator[Rival]:
    """Yield each rival's name, form and call, which returns [B, H, G, D]; note rivals that are absent.

    PyTorch's SDPA has two forms on contiguous keys and values: with `enable_gqa`, and with the group's query
    heads as rows. The faster form counts.
    """
    query_BHGD, key, value = data.query_BHGD, data.key_BHTD, data.value_BHTD
    B, H, G, D = query_BHGD.shape
    heads = query_BHGD.reshape(B, H * G, 1, D)

    def with_gqa() -> torch.Tensor:
        out = scaled_dot_product_attention(heads, key, value, scale=settings.scale, enable_gqa=True)
        return out.view(B, H, G, D)

    def folded() -> torch.Tensor:
        return scaled_dot_product_attention(query_BHGD, key, value, scale=settings.scale)

    for form, call in (("enable_gqa", with_gqa), ("group as rows", folded)):
        yield "dense.sdpa", form, call
        notes.append(f"dense.sdpa ({form}) ran as {sdpa_backend(call) or 'an unknown backend'}")
    for package, make in (("flashinfer", _flashinfer), ("flash_attn", _flash_attn)):
        if query_BHGD.device.type != "cuda":
            notes.append(f"dense.{package} needs a CUDA device")
        elif find_spec(package) is None:
            notes.append(f"dense.{package} is not installed")
        else:
            yield from _working(f"dense.{package}", make, settings, data, notes)


def sdpa_backend(call: Callable[[], torch.Tensor]) -> str | None:
    """Run a call, and return the backend of its `scaled_dot_product_attention`; None if unknown."""
    try:
        ran = operators(call)
    except RuntimeError:
        return None  # the check of the variant reports the error
    took = {name.removeprefix(SDPA) for name in ran if name.startswith(SDPA)}
    if not took and SOFTMAX & set(ran):  # the math backend is not one operator
        return "attention_math"
    return ", ".join(sorted(took)) or None


def _working(
    name: str,
    make: Callable[[KernelSettings, LayerData], Callable[[], torch.Tensor]],
    settings: KernelSettings,
    data: LayerData,
    notes: list[str],
) -> Iterator[Rival]:
    # an error of another project becomes a note
    try:
        call = make(settings, data)
        call()
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        notes.append(f"{name} does not run here: {reason(error)}")
        return
    yield name, None, call


def _flash_attn(settings: KernelSettings, data: LayerData) -> Callable[[], torch.Tensor]:
    attend = import_module("flash_attn").flash_attn_with_kvcache
    B, H, G, D = data.query_BHGD.shape
    query = data.query_BHGD.reshape(B, 1, H * G, D)
    key, value = (x.transpose(1, 2).contiguous() for x in (data.key_BHTD, data.value_BHTD))

    def call() -> torch.Tensor:
        out: torch.Tensor = attend(query, key, value, softmax_scale=settings.scale)
        return out.view(B, H, G, D)

    return call


def _flashinfer(settings: KernelSettings, data: LayerData) -> Callable[[], torch.Tensor]:
    flashinfer = import_module("flashinfer")
    B, H, G, D = data.query_BHGD.shape
    query, (keys, values, table) = data.query_BHGD.reshape(B, H * G, D), data.paged
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    pages, page_size = table.shape[1], keys.shape[2]
    first = torch.arange(B + 1, dtype=torch.int32, device=query.device) * pages
    last_page = torch.full_like(first[1:], settings.context - (pages - 1) * page_size)
    wrapper.plan(
        first, table.flatten(), last_page, H * G, H, D, page_size,
        q_data_type=query.dtype, kv_data_type=keys.dtype, sm_scale=settings.scale,
    )  # fmt: skip

    def call() -> torch.Tensor:
        out: torch.Tensor = wrapper.run(query, (keys, values))
        return out.view(B, H, G, D)

    return call
