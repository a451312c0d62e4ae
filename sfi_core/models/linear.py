"""Weight matrices on a CPU, where PyTorch's own product is slow; other ways give the same sums in float32.

- For a single row, as in a step of one request, `quick_linears` reads the weights at twice the speed: a float32
    matrix in loops that numba compiles, a bfloat16 one by PyTorch's own product in place of oneDNN's.
- For many rows, as in a prompt or a long verification, on a CPU without arithmetic of a 16-bit dtype, any x86
    without AVX-512: `quick_linears` takes the float32 library.
- For a few rows `pack_weights` takes FBGEMM, which ships with PyTorch. It keeps the weights as float16 in tiles,
    in as many bytes.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from platform import machine
from typing import Any

import torch
from torch.nn.functional import linear

from sfi_core.distributed.ranks import ranks_of
from sfi_core.errors import BackendError
from sfi_core.machine.private import multiplies_natively, without_onednn
from sfi_core.machine.threads import served, serving
from sfi_kernels.compiled import why_not

LARGE = 1 << 16  # weights from which on a compiled product of one row pays
WIDE_ROWS = 8  # from here on widening the matrix once pays; measured on AVX2
WIDE_FEATURES = 512  # rows of the matrix that are widened at once: they stay in cache
HALVES = (torch.bfloat16, torch.float16)
ENGINES = ("x86", "fbgemm")
LARGEST = torch.finfo(torch.float16).max


class RowLinear(torch.nn.Linear):
    """A `Linear` that multiplies a single row in another way: float32 in compiled loops, else without oneDNN."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the base's name
        """Return `input` @ weight.T + bias, [..., N]."""
        if input.numel() != self.in_features or not served.get():
            return super().forward(input)
        if self.weight.dtype != torch.float32:
            with without_onednn():
                return super().forward(input)
        from sfi_kernels.row_product import row_product  # noqa: PLC0415 - brings numba

        out = row_product(input, self.weight)
        return (out if self.bias is None else out + self.bias).view(*input.shape[:-1], -1)


class WideLinear(torch.nn.Linear):
    """A `Linear` that multiplies many rows in float32."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the base's name
        """Return `input` @ weight.T + bias, [..., N], in the input's dtype."""
        if input.numel() < WIDE_ROWS * self.in_features or not served.get():
            return super().forward(input)
        wide, outs = input.float(), []
        for start in range(0, self.out_features, WIDE_FEATURES):
            rows = slice(start, start + WIDE_FEATURES)
            bias = None if self.bias is None else self.bias[rows].float()
            outs.append(linear(wide, self.weight[rows].float(), bias).to(input.dtype))
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


class PackedLinear(torch.nn.Linear):
    """A `Linear` with weights in FBGEMM's layout: for a few rows, and for inference only.

    A bfloat16 weight below 2^-14 in size may change by up to 2^-25, float16's spacing there; no other changes.
    """

    _packed: Any
    _dtype: torch.dtype

    def pack(self) -> None:
        """Turn a `Linear` into a `PackedLinear`, in place."""
        bias = None if self.bias is None else self.bias.detach().float()
        packed = torch.ops.quantized.linear_prepack_fp16(self.weight.detach().float(), bias)
        self._packed, self._dtype = packed, self.weight.dtype
        self.__class__ = PackedLinear
        del self._parameters["weight"]
        self._parameters["bias"] = None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weights, unpacked at each access, [N, K]."""
        return torch.ops.quantized.linear_unpack_fp16(self._packed)[0].to(self._dtype)  # type: ignore[no-any-return]

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self.in_features * self.out_features * self._dtype.itemsize

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the base's name
        """Return `input` @ weight.T + bias, [..., N], in the input's dtype."""
        out = torch.ops.quantized.linear_dynamic_fp16(input.float(), self._packed)
        return out.to(input.dtype)  # type: ignore[no-any-return]


def crawls(dtype: torch.dtype) -> bool:
    """Say whether PyTorch multiplies matrices of a dtype on this CPU without a library made for it."""
    if machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return not multiplies_natively(dtype)


@contextmanager
def quick_linears(model: Any) -> Iterator[None]:
    """Inside, let a model's `Linear` layers multiply in another way where that is faster, for this thread."""
    changed = [] if ranks_of(model).size > 1 else [(m, kind) for m in _linears(model) if (kind := _quicker(m))]
    for module, kind in changed:
        module.__class__ = kind
    try:
        with serving():
            yield
    finally:
        for module, _ in changed:
            module.__class__ = torch.nn.Linear


def pack_weights(model: Any, progress: Callable[[int, int], None] | None = None) -> None:
    """Pack the weights of a model's `Linear` layers in place, for good; raise as `check_packing`.

    Four rows take a quarter of the time on an AVX2 processor, one row three quarters. Packing is slow, about
    20 ns a weight and core. An output matrix that is also the input embedding is kept twice. A layer with a
    weight beyond float16's range is not packed; a model that is split over ranks is refused. `progress`
    receives how many layers are packed, and of how many.
    """
    check_packing(model.device, model.dtype)
    if ranks_of(model).size > 1:
        raise BackendError("weights of a model that is split over ranks cannot be packed")
    layers = [m for m in _linears(model) if m.weight.dtype in HALVES and m.weight.abs().max() <= LARGEST]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done, _ in enumerate(pool.map(PackedLinear.pack, layers), 1):
            if progress is not None:
                progress(done, len(layers))


def check_packing(device: torch.device, dtype: torch.dtype) -> None:
    """Raise `BackendError` unless the model is half precision on a CPU, and PyTorch has FBGEMM."""
    if device.type != "cpu" or dtype not in HALVES:
        got = f"{str(dtype).removeprefix('torch.')} on {device.type}"
        raise BackendError(f"packed weights must be bfloat16 or float16 on a CPU, got {got}")
    if torch.backends.quantized.engine not in ENGINES:
        raise BackendError("packed weights need FBGEMM, which PyTorch has on x86 processors only")


def _linears(model: Any) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


def _quicker(module: torch.nn.Linear) -> type[torch.nn.Linear] | None:
    weight = module.weight
    if weight.device.type != "cpu":
        return None
    if crawls(weight.dtype):
        return WideLinear
    compiled = weight.dtype != torch.float32 or (weight.is_contiguous() and not why_not())
    return (
        RowLinear if weight.numel() >= LARGE and weight.dtype in (torch.float32, torch.bfloat16) and compiled else None
    )
