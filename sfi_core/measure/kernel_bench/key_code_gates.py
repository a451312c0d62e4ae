"""Checks of key codes before timing: levels and logits in float64, without our kernels."""

import torch

from sfi_core.measure.kernel_bench.gates import share
from sfi_kernels.key_codes import CodeBasis, bits_of
from sfi_kernels.key_codes.layout import BITS


def levels(code: torch.Tensor) -> torch.Tensor:
    """Return a code's levels, [H, C, T] int64, from bytes (PyTorch) or from the bits of words (Triton)."""
    if code.dtype == torch.uint8:
        return code.long()
    rest, fields = code.long() % 2**32, []
    for bits in BITS:
        fields.append(rest % 2**bits)
        rest = rest // 2**bits
    return torch.stack(fields, 1).flatten(1, 2)  # by slot, then by word


def encode_error(key_HTD: torch.Tensor, code: torch.Tensor, basis: CodeBasis) -> float:
    """Compare each key's channel with the interval of its level.

    Within rounding of an edge, either level is right. A float32 product of D differences is off by D + 3
    roundings of the sum of its terms' sizes.
    """
    mean, encode = basis.mean_HD.double(), basis.encode_HDC.double()
    key = key_HTD.double()
    step_HTC = (key - mean[:, None]) @ encode
    sizes = (key.abs() + mean.abs()[:, None]) @ encode.abs()
    bound = (key.shape[-1] + 3) * torch.finfo(torch.float32).eps * sizes
    level_HTC = levels(code).mT
    bits_C = torch.tensor(bits_of(key.shape[-1]), device=key.device)
    most_C = 2**bits_C - 1
    low = level_HTC - (most_C + 1) / 2
    below = (low - step_HTC).masked_fill(level_HTC == 0, 0.0).clamp_min(0)
    above = (step_HTC - low - 1).masked_fill(level_HTC == most_C, 0.0).clamp_min(0)
    return share(below + above, bound)


def scan_error(
    logits_HGT: torch.Tensor,
    query_HGD: torch.Tensor,
    code: torch.Tensor,
    basis: CodeBasis,
    scale: float,
) -> float:
    """Compare logits with the product of the query and the middles of the levels' intervals.

    A product of D terms, a product of C terms and their sum are off by as many roundings of the sum of the
    terms' sizes.
    """
    query, mean, project = (x.double() for x in (query_HGD, basis.mean_HD, basis.query_HDC))
    bits_C1 = torch.tensor(bits_of(query.shape[-1]), device=query.device)[:, None]
    half_C1 = 2.0 ** (bits_C1.double() - 1)
    level_HCT = levels(code).double()
    expected = query @ mean[..., None] + query @ project @ (level_HCT + 0.5 - half_C1)
    # an implementation may multiply the levels and their middle separately
    sizes = query.abs() @ mean.abs()[..., None]
    sizes = sizes + query.abs() @ project.abs() @ (level_HCT + half_C1)
    terms = query.shape[-1] + len(bits_C1) + 4
    bound = terms * torch.finfo(torch.float32).eps * sizes * scale
    return share((logits_HGT - expected * scale).abs(), bound)
