"""A product with its norm, gate and sum in one launch: transformers' own modules, with their roundings."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear, silu
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

from sfi_kernels.launch import KernelLimitError
from sfi_kernels.products import project
from sfi_kernels.products.triton import rows_of_tile
from tests.kernels.test_fused_ops import DTYPES, EPS, KERNEL_DTYPES, close, drawn, norm_module

SHAPES = [(1, 70, 24), (1, 1100, 10), (3, 24, 40), (16, 300, 70)]
KINDS = ("plain", "norm, bias", "norm, gated", "residual")


def operands(kind: str, M: int, K: int, N: int, dtype: torch.dtype) -> tuple[tuple, dict]:
    rows, weight = drawn(M, 1, K, dtype=dtype, scale=1), drawn(N, K, dtype=dtype, scale=K**-0.5)
    options: dict = {}
    if "norm" in kind:
        options = {"norm_K": norm_module(K, dtype).weight, "eps": EPS}
    if "bias" in kind:
        options["bias_N"] = drawn(N, dtype=dtype)
    if "gated" in kind:
        options["gated"] = True
    if "residual" in kind:
        options["residual_XN"] = drawn(M, 1, N, dtype=dtype)
    return (rows, weight), options


def written_out(multiply: Callable, rows, weight, bias_N=None, norm_K=None, eps=0.0, residual_XN=None, gated=False):
    """Call what transformers calls, one thing after the other."""
    if norm_K is not None:
        norm = norm_module(len(norm_K), rows.dtype)
        norm.weight.data = norm_K
        rows = norm(rows)
    out = multiply(rows, weight, bias_N)
    if gated:
        gate, up = out.chunk(2, -1)
        out = silu(gate) * up
    return out if residual_XN is None else residual_XN + out


def rounded_once(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    exact = linear(rows.double(), weight.double(), None if bias is None else bias.double())
    return exact.to(rows.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_is_transformers_modules(dtype: torch.dtype):
    for kind in KINDS:
        given, options = operands(kind, 3, 24, 40, dtype)
        assert torch.equal(project.reference(*given, **options), written_out(linear, *given, **options))
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=40)).to(dtype).requires_grad_(False)
    rows, both = drawn(2, 32, dtype=dtype), torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    gated = project.reference(rows, both, gated=True)
    out = project.reference(gated, mlp.down_proj.weight, residual_XN=rows)
    close(out, rows + mlp(rows))  # one product of gate and up may add in another order than two


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("M", "K", "N"), SHAPES)
def test_the_kernel_rounds_as_transformers(kernel_device, M, K, N, kind: str, dtype: torch.dtype):
    """To float16 nearly all numbers are the same: a rounding that is missing, or one more, changes a tenth."""
    given, options = operands(kind, M, K, N, dtype)
    expected = written_out(rounded_once, *given, **options)
    moved = {name: x.to(kernel_device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    ours = project.triton(*(x.to(kernel_device) for x in given), **moved).cpu()
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, rtol=32 * torch.finfo(dtype).eps, atol=32 * torch.finfo(dtype).eps)
    if dtype == torch.float16:
        assert (ours != expected).float().mean() < 0.02


def test_a_program_owns_rows_so_that_the_busiest_processor_reads_least():
    """Qwen3-4B's output, and its gate and up, on the 132 processors of an H100."""
    assert [rows_of_tile(2560, M, 132) for M in (1, 16)] == [4, 32]
    assert [rows_of_tile(19456, M, 132) for M in (1, 16)] == [8, 32]
    assert [rows_of_tile(6144, M, 132) for M in (1, 2)] == [8, 16]


def test_what_does_not_fit_is_named(kernel_device):
    rows, weight = torch.ones(17, 1, 8), torch.ones(6, 8)
    for message, options in {
        r"bias must be \[N=6\], got \[8\]": {"bias_N": torch.ones(8)},
        r"norm must be \[K=8\], got \[6\]": {"norm_K": torch.ones(6)},
        r"residual must have the result's shape, \[17, 1, 3\]": {"residual_XN": torch.ones(17, 1, 6), "gated": True},
        "residual must have the dtype of rows": {"residual_XN": torch.ones(17, 1, 6).half()},
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            project(rows, weight, **options)
    with pytest.raises(ValueError, match=r"^weight must be \[N, K=8\], got \[8, 6\]"):
        project(rows, weight.T)
    with pytest.raises(ValueError, match=r"^weight must have an even first size where it is gated, got 5"):
        project(rows, weight[:5], gated=True)
    with pytest.raises(ValueError, match=r"^weight must be contiguous"):
        project(rows, torch.ones(8, 6).T)
    with pytest.raises(KernelLimitError, match=r"^rows must be at most 16 for the kernel, got 17"):
        project.triton(rows.to(kernel_device), weight.to(kernel_device))
