"""Dense attention of other projects."""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import torch
from torch.nn.functional import scaled_dot_product_attention

from sfi_core.machine.private import Operators
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.result import reason

FLASHINFER_WORKSPACE = 256 << 20  # bytes
SDPA, SOFTMAX = "_scaled_dot_product_", {"_softmax", "_safe_softmax"}
Call = Callable[[], torch.Tensor]


def rivals(layer: LayerData) -> Iterator[tuple[str, str | None, Call]]:
    """Yield each rival's name, form and call, which returns [B, H, G, D]; note rivals that are absent.

    PyTorch's SDPA has two forms on contiguous keys and values: with `enable_gqa`, and with the group's query
    heads as rows. The faster form counts.
    """
    for form, call in _sdpa(layer).items():
        yield "dense.sdpa", form, call
        layer.notes.append(f"dense.sdpa ({form}) ran as {sdpa_backend(call) or 'an unknown backend'}")
    for package, make in (("flashinfer", _flashinfer), ("flash_attn", _flash_attn)):
        if layer.device.type != "cuda":
            layer.notes.append(f"dense.{package} needs a CUDA device")
        elif find_spec(package) is None:
            layer.notes.append(f"dense.{package} is not installed")
        else:
            try:
                call = make(layer)
                call()
            except (RuntimeError, ValueError, TypeError, ImportError) as error:  # another project's
                layer.notes.append(f"dense.{package} does not run here: {reason(error)}")
            else:
                yield f"dense.{package}", None, call


def sdpa_backend(call: Call) -> str | None:
    """Run a call, and return the backend of its `scaled_dot_product_attention`; None if unknown."""
    try:
        with Operators() as seen:
            call()
    except RuntimeError:
        return None  # the check of the variant reports the error
    took = {name.removeprefix(SDPA) for name in seen.names if name.startswith(SDPA)}
    if not took and SOFTMAX & set(seen.names):  # the math backend is not one operator
        return "attention_math"
    return ", ".join(sorted(took)) or None


def _sdpa(layer: LayerData) -> dict[str, Call]:
    query, heads = layer.query_BHGD, layer.query_BHGD.flatten(1, 2)[:, :, None]
    rows, scale = (layer.key_BHTD, layer.value_BHTD), layer.settings.scale
    return {
        "enable_gqa": lambda: scaled_dot_product_attention(heads, *rows, scale=scale, enable_gqa=True).view_as(query),
        "group as rows": lambda: scaled_dot_product_attention(query, *rows, scale=scale),
    }


def _flash_attn(layer: LayerData) -> Call:
    attend = import_module("flash_attn").flash_attn_with_kvcache
    query = layer.query_BHGD.flatten(1, 2)[:, None]
    key, value = (x.transpose(1, 2).contiguous() for x in (layer.key_BHTD, layer.value_BHTD))
    return lambda: attend(query, key, value, softmax_scale=layer.settings.scale).view_as(layer.query_BHGD)


def _flashinfer(layer: LayerData) -> Call:
    flashinfer = import_module("flashinfer")
    B, H, G, D = layer.query_BHGD.shape
    query, (keys, values, table) = layer.query_BHGD.flatten(1, 2), layer.paged
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    pages, page_size = table.shape[1], keys.shape[2]
    first = torch.arange(B + 1, dtype=torch.int32, device=query.device) * pages
    last_page = torch.full_like(first[1:], layer.settings.context - (pages - 1) * page_size)
    wrapper.plan(
        first, table.flatten(), last_page, H * G, H, D, page_size,
        q_data_type=query.dtype, kv_data_type=keys.dtype, sm_scale=layer.settings.scale,
    )  # fmt: skip
    return lambda: wrapper.run(query, (keys, values)).view_as(layer.query_BHGD)
