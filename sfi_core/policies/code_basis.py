"""The basis of the key codes of `codescan`: the directions in which queries tell keys apart."""

import torch

from sfi_kernels.key_codes import CodeBasis, bits_of

# by bits: the step, in standard deviations, of the best uniform quantizer of a normal variable
STEP = {1: 1.596, 2: 0.9957, 4: 0.3352}
KEYS = 2048  # fewer than twice as many are looked at, which is enough for a covariance
RIDGE = 1e-2  # share of the queries' mean variance that is added in all directions


def learn_basis(key_HTD: torch.Tensor, query_HND: torch.Tensor) -> CodeBasis:
    """Find the basis that keeps most of the variance of q . k in the fewest channels.

    With the second moment of the queries Cq and the covariance of the keys Ck, the channels are the leading
    eigenvectors U of Cq^1/2 Ck Cq^1/2: keys are projected by Cq^1/2 U and queries by Cq^-1/2 U, so that the
    products over all channels add up to q . k. Quantization assumes normal keys in each channel.

    Args:
        key_HTD: Keys of a layer, without the sinks.
        query_HND: Queries of each KV head's group. Both are after rotary position embedding.
    """
    key_HTD = key_HTD[:, :: max(1, key_HTD.shape[1] // KEYS)].float()
    query_HND = query_HND.float()
    D = key_HTD.shape[-1]
    mean_HD = key_HTD.mean(1)
    centered_HTD = key_HTD - mean_HD[:, None]
    root, inverse = _roots(query_HND.mT @ query_HND / query_HND.shape[1])
    covariance_HDD = centered_HTD.mT @ centered_HTD / centered_HTD.shape[1]
    _, vectors_HDD = torch.linalg.eigh(root @ covariance_HDD @ root)
    factor_C = torch.tensor([STEP[bits] for bits in bits_of(D)], device=key_HTD.device)
    C = len(factor_C)
    leading_HDC = vectors_HDD.flip(-1)[..., :C]
    leading_HDC = torch.nn.functional.pad(leading_HDC, (0, max(0, C - D)))
    encode_HDC, query_HDC = root @ leading_HDC, inverse @ leading_HDC
    deviation_HC = (centered_HTD @ encode_HDC).square().mean(1).sqrt()
    step_H1C = (deviation_HC * factor_C).clamp_min(torch.finfo().eps)[:, None]
    return CodeBasis(mean_HD, encode_HDC / step_H1C, query_HDC * step_H1C)


def _roots(moment_HDD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # the square root of symmetric matrices and its inverse
    mean_H = moment_HDD.diagonal(dim1=1, dim2=2).mean(-1)
    eye_DD = torch.eye(moment_HDD.shape[-1], device=moment_HDD.device)
    ridge_H = (RIDGE * mean_H).clamp_min(torch.finfo().tiny)
    values_HD, vectors_HDD = torch.linalg.eigh(moment_HDD + ridge_H[:, None, None] * eye_DD)
    root_HD = values_HD.clamp_min(torch.finfo().tiny).sqrt()
    by_root = (vectors_HDD * root_HD[:, None]) @ vectors_HDD.mT
    by_inverse = (vectors_HDD / root_HD[:, None]) @ vectors_HDD.mT
    return by_root, by_inverse
