"""Norms, rotations and gates: transformers' own modules, bit for bit or within a few roundings."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from sfi_kernels.fused import add_rms_norm, rms_norm, rotary, silu_mul
from sfi_kernels.launch import KernelLimitError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KERNEL_DTYPES = DTYPES[:2]  # Triton's interpreter cuts a bfloat16 off where a GPU rounds it
EPS = 1e-5


def drawn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def norm_module(width: int, dtype: torch.dtype) -> LlamaRMSNorm:
    module = LlamaRMSNorm(width, EPS)
    module.weight.data = drawn(width, dtype=dtype)
    return module.requires_grad_(False)


def close(ours: torch.Tensor, expected: torch.Tensor, roundings: int = 8) -> None:
    """Compare what a kernel made: within roundings, and in float16 nearly all equal.

    A row's float32 sum may differ in its last bit, since kernels add in another order. Where the float32
    result then lies at the border of two float16 numbers, the other one comes out.
    """
    ours = ours.cpu()
    bound = roundings * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, expected, rtol=bound, atol=bound)
    if ours.dtype == torch.float16:
        assert (ours != expected).float().mean() < 5e-3


def angles(B: int, T: int, D: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw angles as transformers lays them out: the second half repeats the first."""
    half = torch.rand(B, T, D // 2) * 6.3
    angle = torch.cat((half, half), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_references_are_transformers_modules_bit_for_bit(dtype: torch.dtype):
    norm, hidden, residual = norm_module(96, dtype), drawn(2, 5, 96, dtype=dtype), drawn(2, 5, 96)
    residual = residual.to(dtype)
    assert torch.equal(rms_norm.reference(hidden, norm.weight, EPS), norm(hidden))
    total, normed = add_rms_norm.reference(residual, hidden, norm.weight, EPS)
    assert torch.equal(total, residual + hidden)
    assert torch.equal(normed, norm(residual + hidden))

    q_norm, k_norm = norm_module(16, dtype), norm_module(16, dtype)
    query, key = drawn(2, 5, 6, 16, dtype=dtype), drawn(2, 5, 3, 16, dtype=dtype)
    cos, sin = angles(2, 5, 16, dtype)
    for normed_too in (False, True):
        weights = (q_norm.weight, k_norm.weight, EPS) if normed_too else ()
        rows = (q_norm(query), k_norm(key)) if normed_too else (query, key)
        expected = apply_rotary_pos_emb(*(x.transpose(1, 2) for x in rows), cos, sin)
        rotated = rotary.reference(query, key, cos, sin, *weights)
        assert all(map(torch.equal, rotated, expected))

    act = LlamaMLP(LlamaConfig(hidden_size=32)).act_fn
    gate, up = drawn(2, 5, 8, dtype=dtype), drawn(2, 5, 8, dtype=dtype)
    assert torch.equal(silu_mul.reference(gate, up), act(gate) * up)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 80, 128, 2560, 16384])
def test_the_norm_kernel_rounds_as_transformers(kernel_device, width: int, dtype: torch.dtype):
    norm, hidden = norm_module(width, dtype), drawn(3, 2, width, dtype=dtype)
    residual = drawn(3, 2, width, dtype=dtype)
    weight = norm.weight.to(kernel_device)
    close(rms_norm.triton(hidden.to(kernel_device), weight, EPS), norm(hidden))
    total, normed = add_rms_norm.triton(residual.to(kernel_device), hidden.to(kernel_device), weight, EPS)
    assert torch.equal(total.cpu(), residual + hidden)
    close(normed, norm(residual + hidden))


def test_a_norm_of_tiny_and_of_zero_rows_is_finite(kernel_device):
    """The `eps` decides there."""
    norm = norm_module(64, torch.float32)
    hidden = torch.stack([torch.zeros(64), drawn(64) * 1e-6])
    close(rms_norm.triton(hidden.to(kernel_device), norm.weight.to(kernel_device), EPS), norm(hidden))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "X", "H", "D"), [(1, 1, 32, 8, 128), (3, 5, 5, 1, 16), (2, 3, 4, 2, 96), (1, 2, 3, 3, 256)]
)
def test_the_rotary_kernel_rounds_as_transformers(kernel_device, B, T, X, H, D, normed, dtype):
    """Queries and keys are parts of one product."""
    query, key = drawn(B, T, X + H, D, dtype=dtype).split((X, H), 2)
    norms = norm_module(D, dtype), norm_module(D, dtype)
    cos, sin = angles(B, T, D, dtype)
    rows = (norms[0](query), norms[1](key)) if normed else (query, key)
    expected = apply_rotary_pos_emb(*(x.transpose(1, 2) for x in rows), cos, sin)
    weights = [norm.weight.to(kernel_device) for norm in norms] if normed else [None, None]
    both, *moved = (x.to(kernel_device) for x in (torch.cat((query, key), 2), cos, sin))
    rotated = rotary.triton(*both.split((X, H), 2), *moved, *weights, EPS)
    for ours, theirs in zip(rotated, expected, strict=True):
        close(ours, theirs, 32)  # a difference of products, each up to 30 or so


def test_requests_may_share_their_angles(kernel_device):
    """`model.generate` gives one row of positions for a batch without padding."""
    query, key = drawn(3, 4, 2, 8).to(kernel_device), drawn(3, 4, 1, 8).to(kernel_device)
    cos, sin = (x.to(kernel_device) for x in angles(1, 4, 8, torch.float32))
    shared = rotary.triton(query, key, cos, sin)
    apart = rotary.triton(query, key, cos.expand(3, -1, -1), sin.expand(3, -1, -1))
    assert all(map(torch.equal, shared, apart))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 1000)], ids=str)
def test_the_gate_kernel_rounds_as_transformers(kernel_device, shape, dtype: torch.dtype):
    """Both are parts of one product."""
    product = drawn(*shape[:-1], 2 * shape[-1], dtype=dtype)
    product.view(-1)[:2] = torch.tensor([-200.0, 200.0])  # exp overflows, or vanishes
    gate, up = product.chunk(2, -1)
    act = LlamaMLP(LlamaConfig(hidden_size=32)).act_fn
    close(silu_mul.triton(*product.to(kernel_device).chunk(2, -1)), act(gate) * up)


def test_what_does_not_fit_is_named():
    weight, hidden = torch.ones(8), torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"^weight must be \[F=8\], got \[4\]$"):
        rms_norm(hidden, weight[:4], EPS)
    with pytest.raises(ValueError, match=r"^weight must have the dtype of hidden"):
        rms_norm(hidden, weight.half(), EPS)
    with pytest.raises(ValueError, match=r"^hidden must be contiguous"):
        rms_norm(torch.ones(8, 8).T, weight, EPS)
    with pytest.raises(ValueError, match=r"^residual must have the shape of hidden"):
        add_rms_norm(torch.ones(3, 8), hidden, weight, EPS)
    with pytest.raises(ValueError, match=r"^up must have the shape of gate"):
        silu_mul(hidden, torch.ones(3, 8))
    with pytest.raises(ValueError, match=r"^gate must have rows at one distance"):
        silu_mul(torch.ones(4, 3, 8).transpose(0, 1), torch.ones(3, 4, 8))
    with pytest.raises(ValueError, match=r"^up must have rows at one distance"):
        silu_mul(torch.ones(8, 8), torch.ones(8, 8).T)
    rows, angle = torch.ones(1, 2, 2, 8), torch.ones(1, 2, 8)
    with pytest.raises(ValueError, match=r"^query_weight and key_weight must be given together"):
        rotary(rows, rows, angle, angle, weight)
    with pytest.raises(ValueError, match=r"^cos must be \[B=1, T=2, D=8\], got \[1, 2, 4\]$"):
        rotary(rows, rows, angle[..., :4], angle)
    with pytest.raises(ValueError, match=r"^query must have an even last size, got 7$"):
        rotary(rows[..., :7].contiguous(), rows[..., :7].contiguous(), angle, angle)


def test_rows_wider_than_the_kernels_are_refused(kernel_device):
    wide = torch.ones(1, 16385, device=kernel_device)
    with pytest.raises(KernelLimitError, match=r"^hidden must be at most 16384 wide"):
        rms_norm.triton(wide, wide[0], EPS)
    rows, angle = torch.ones(1, 1, 1, 258), torch.ones(1, 1, 258)
    with pytest.raises(KernelLimitError, match=r"^heads must be at most 256 wide"):
        rotary.triton(*(x.to(kernel_device) for x in (rows, rows, angle, angle)))
