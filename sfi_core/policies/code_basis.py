"""The basis of the key codes of `codescan`: the directions in which queries tell keys apart."""

import math
from functools import cache

import torch

from sfi_kernels.code_scan import CodeBasis, bits_of

# by bits: the step, in standard deviations, of the best uniform quantizer of a normal variable
STEP = {1: 1.596, 2: 0.9957, 4: 0.3352}
KEYS = 2048  # fewer than twice as many are looked at, which is enough for a covariance
# shares of the mean variance that are added in all directions: to the queries', and so that any number of
# directions can be told apart
RIDGE, FLOOR = 1e-2, 1e-5
# of the iteration: with 6 to 20 the codes of SmolLM2-135M miss as much attention as with exact eigenvectors
ROUNDS = 8


def learn_basis(key_HTD: torch.Tensor, query_HND: torch.Tensor) -> CodeBasis:
    """Find the basis that keeps most of the variance of q . k in the fewest channels.

    With the second moment of the queries L L^T and the covariance of the keys C, the channels are the leading
    eigenvectors U of L^T C L: keys are projected by L U and queries by L^-T U, so that the products over all
    channels add up to q . k. Quantization assumes normal keys in each channel. On a GPU the host does not
    wait, as it would for PyTorch's eigenvectors.

    Args:
        key_HTD: Keys of a layer, without the sinks.
        query_HND: Queries of each KV head's group. Both are after rotary position embedding.
    """
    key_HTD = key_HTD[:, :: max(1, key_HTD.shape[1] // KEYS)].float()
    query_HND = query_HND.float()
    D = key_HTD.shape[-1]
    mean_HD = key_HTD.mean(1)
    centered_HTD = key_HTD - mean_HD[:, None]
    moment_HDD = _ridged(query_HND.mT @ query_HND / query_HND.shape[1], RIDGE)
    root_HDD, _ = torch.linalg.cholesky_ex(moment_HDD)
    covariance_HDD = centered_HTD.mT @ centered_HTD / centered_HTD.shape[1]
    factor_C = _factors(D, key_HTD.device)
    leading_HDC = _leading(root_HDD.mT @ covariance_HDD.double() @ root_HDD, len(factor_C))
    encode_HDC = (root_HDD @ leading_HDC).float()
    query_HDC = torch.linalg.solve_triangular(root_HDD.mT, leading_HDC, upper=True).float()
    deviation_HC = (centered_HTD @ encode_HDC).square().mean(1).sqrt()
    step_H1C = (deviation_HC * factor_C).clamp_min(torch.finfo().eps)[:, None]
    return CodeBasis(mean_HD, encode_HDC / step_H1C, query_HDC * step_H1C)


@cache
def _factors(D: int, device: torch.device) -> torch.Tensor:
    # the channels' steps in standard deviations; cached because a copy to the device waits
    return torch.tensor([STEP[bits] for bits in bits_of(D)], device=device)


def _ridged(square_HDD: torch.Tensor, share: float) -> torch.Tensor:
    # in float64, with `share` of the mean diagonal added to it
    diagonal_HD = square_HDD.diagonal(dim1=1, dim2=2)
    ridge_H1 = (share * diagonal_HD.mean(1, keepdim=True)).clamp_min(torch.finfo().tiny)
    return square_HDD.double() + torch.diag_embed(ridge_H1.expand_as(diagonal_HD).double())


def _leading(variance_HDD: torch.Tensor, count: int) -> torch.Tensor:
    # orthonormal directions of the largest variance, in order, [H, D, count], zeros beyond D: by orthogonal
    # iteration from cosines
    variance_HDD = _ridged(variance_HDD, FLOOR)
    D = variance_HDD.shape[-1]
    place_D = torch.arange(D, dtype=torch.float64, device=variance_HDD.device)
    found_HDC = torch.outer((place_D + 0.5) * (math.pi / D), place_D[:count]).cos().expand(len(variance_HDD), -1, -1)
    for _ in range(ROUNDS):
        found_HDC = variance_HDD @ found_HDC
        size_HCC, _ = torch.linalg.cholesky_ex(found_HDC.mT @ found_HDC)
        found_HDC = torch.linalg.solve_triangular(size_HCC.mT, found_HDC, upper=True, left=False)
    order_HC = (found_HDC * (variance_HDD @ found_HDC)).sum(1).argsort(descending=True)
    found_HDC = found_HDC.take_along_dim(order_HC[:, None], 2)
    return torch.nn.functional.pad(found_HDC, (0, count - found_HDC.shape[-1]))
