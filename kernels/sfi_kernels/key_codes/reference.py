"""Key codes in PyTorch: one byte a channel, so that a scan is one matrix product."""

from collections.abc import Callable

import torch

from sfi_kernels.key_codes.layout import SLOTS, CodeBasis, half_levels, level_range, words
from sfi_kernels.shapes import check_shape
from sfi_kernels.top_k import top_k

# of a float32's bits: those that a score drops, and the score of 2^-32
DROPPED = 20
LOWEST = (127 - 32) << 3


def encode_keys(key_HTD: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    """Code the keys of one request.

    Returns:
        level_HCT, [H, C, T] uint8. Triton and numba return word_HWT, [H, W, T] int32, with the same levels.
    """
    check(key_HTD, basis)
    D, device = key_HTD.shape[2], key_HTD.device
    step_HTC = (key_HTD.float() - basis.mean_HD[:, None]).bmm(basis.encode_HDC)
    # few operations, all in place: a decoding step codes one key
    level_HTC = step_HTC.floor_().add_(half_levels(D, device)).clamp_(*level_range(D, device))
    return level_HTC.mT.to(torch.uint8, memory_format=torch.contiguous_format)


def scan_codes(query_HGD: torch.Tensor, code_HXT: torch.Tensor, basis: CodeBasis, *, scale: float) -> torch.Tensor:
    """Estimate the logits of all keys, [H, G, T] float32, for one request's queries, from the keys' codes.

    `code_HXT` are the codes that `encode_keys` of the same backend returned; `scale` is the factor on the
    products. As `encode_keys`, it raises `ValueError` where shapes do not fit.
    """
    check(query_HGD, basis)
    query_HGD = query_HGD.float() * scale
    query_HGC = query_HGD.bmm(basis.query_HDC)
    constant_HG1 = query_HGD.bmm(basis.mean_HD[:, :, None])
    constant_HG1 += query_HGC @ (0.5 - half_levels(query_HGD.shape[2], query_HGD.device))[:, None]
    # a product and a sum in place: baddbmm would first spread the constant over the tokens
    return query_HGC.bmm(code_HXT.float()).add_(constant_HG1)


def check(rows_HXD: torch.Tensor, basis: CodeBasis) -> None:
    """Raise `ValueError` unless keys or queries fit the basis."""
    check_shape(rows_HXD, "keys or queries", H=None, X=None, D=None)
    H, _, D = rows_HXD.shape
    C = SLOTS * words(D)
    check_shape(basis.mean_HD, "mean", H=H, D=D)
    check_shape(basis.encode_HDC, "encode", H=H, D=D, C=C)
    check_shape(basis.query_HDC, "query", H=H, D=D, C=C)


def choose_likeliest(logits_HGT: torch.Tensor, budget: int, *, rest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the keys of one request that are likeliest, in the mean over the query heads of a KV head.

    Args:
        logits_HGT: Logits of the candidates, float32, not NaN; undefined afterwards.
        budget: Keys to choose by KV head, fewer than T. Those with the highest `coarse_score` are chosen; the
            lower position wins a tie.
        rest: Factor on the probability of the keys that are not chosen.

    Returns:
        index_HK, int32, ascending, and the log of `rest` times the summed exponentials of the other keys'
            logits, unread_HG, float32; -inf if that is 0.
    """
    return choose_by(top_k.reference, logits_HGT, budget, rest)


def choose_by(
    select: Callable[[torch.Tensor, int], torch.Tensor], logits_HGT: torch.Tensor, budget: int, rest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose as `choose_likeliest`, with an implementation of `top_k`."""
    check_choice(logits_HGT, budget)
    H, G, _ = logits_HGT.shape
    log_sum_HG = logits_HGT.logsumexp(-1)
    weight_HGT = (logits_HGT - log_sum_HG[..., None]).exp()
    index_HK = select(coarse_score(weight_HGT.mean(1))[None], budget)[0]
    read_HGK = weight_HGT.gather(2, index_HK.long()[:, None].expand(H, G, -1))
    unread_HG = (1 - read_HGK.sum(-1)).clamp_min(0) * rest
    return index_HK, log_sum_HG + unread_HG.log()


def coarse_score(weight_HT: torch.Tensor) -> torch.Tensor:
    """Round probabilities to 256 scores: their exponent and 3 bits of the mantissa, from 2^-32 to 1.

    Two keys with one score differ by an eighth, less than what their codes leave open. One histogram finds
    the threshold.
    """
    bits_HT = weight_HT.float().view(torch.int32)
    return ((bits_HT >> DROPPED) - LOWEST).clamp_(0, 255).float()


def check_choice(logits_HGT: torch.Tensor, budget: int) -> None:
    """Raise `ValueError` unless there is something to choose."""
    check_shape(logits_HGT, "logits", H=None, G=None, T=None)
    if not 0 < budget < logits_HGT.shape[2]:
        raise ValueError(f"budget must be within 1 and {logits_HGT.shape[2] - 1}, got {budget}")
