"""Key codes on a CPU, compiled: one word a key, as in Triton."""

import torch

from sfi_kernels import loops
from sfi_kernels.key_codes.layout import CodeBasis
from sfi_kernels.key_codes.reference import check, check_choice
from sfi_kernels.numpy_views import flat, plain
from sfi_kernels.shapes import check_int32, check_shape


def encode_keys(key_HTD: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    """See `reference.encode_keys`; returns word_HT."""
    check(key_HTD, basis)
    word_HT = torch.empty(key_HTD.shape[:2], dtype=torch.int32)
    loops.encode(plain(key_HTD), plain(basis.mean_HD), plain(basis.encode_HDC), word_HT.numpy())
    return word_HT


def scan_codes(
    query_HGD: torch.Tensor, code_HTX: torch.Tensor, basis: CodeBasis, *, scale: float
) -> torch.Tensor:
    """See `reference.scan_codes`; the codes are word_HT, with any stride of H."""
    check(query_HGD, basis)
    H, G, _ = query_HGD.shape
    check_shape(code_HTX, "words", H=H, T=None)
    check_int32(query_HGD.device, words=code_HTX[0])
    logits_HGT = torch.empty(H, G, code_HTX.shape[1])
    loops.scan(
        plain(query_HGD), flat(code_HTX), code_HTX.stride(0), plain(basis.mean_HD), plain(basis.query_HDC),
        loops.F(scale), logits_HGT.numpy(),
    )  # fmt: skip
    return logits_HGT


def choose_likeliest(
    logits_HGT: torch.Tensor, budget: int, *, rest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.choose_likeliest`; `logits_HGT` must be contiguous.

    Weights have float32's rounding, and those below its normal numbers are 0 and tie.
    """
    check_choice(logits_HGT, budget)
    H, G, _ = logits_HGT.shape
    index_HK, unread_HG = torch.empty(H, budget, dtype=torch.int32), torch.empty(H, G)
    loops.choose(logits_HGT.numpy(), budget, loops.F(rest), index_HK.numpy(), unread_HG.numpy())
    return index_HK, unread_HG
