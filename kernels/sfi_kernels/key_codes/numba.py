"""Key codes on a CPU, compiled: words, as in Triton."""

import torch

from sfi_kernels import loops
from sfi_kernels.compiled import by_heads
from sfi_kernels.key_codes.layout import CodeBasis, words
from sfi_kernels.key_codes.reference import check, check_choice
from sfi_kernels.numpy_views import flat, plain
from sfi_kernels.shapes import check_int32, check_shape

MANY = 16  # keys that a matrix product codes sooner than a loop
SCAN, CHOOSE = 1e-3, 1e-3  # microseconds of a word and query, and of a logit, on a Zen 4


def encode_keys(key_HTD: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    """See `reference.encode_keys`; returns word_HWT."""
    check(key_HTD, basis)
    H, T, D = key_HTD.shape
    word_HWT = torch.empty(H, words(D), T, dtype=torch.int32)
    if T < MANY:
        loops.encode(plain(key_HTD), plain(basis.mean_HD), plain(basis.encode_HWDC), word_HWT.numpy())
    else:
        step_HTC = (key_HTD.float() - basis.mean_HD[:, None]).bmm(basis.encode_HDC)
        loops.pack_levels(plain(step_HTC), word_HWT.numpy())
    return word_HWT


def scan_codes(query_HGD: torch.Tensor, code_HXT: torch.Tensor, basis: CodeBasis, *, scale: float) -> torch.Tensor:
    """See `reference.scan_codes`; the codes are word_HWT, with any strides of H and W."""
    check(query_HGD, basis)
    H, G, D = query_HGD.shape
    check_shape(code_HXT, "words", H=H, W=words(D), T=None)
    check_int32(query_HGD.device, words=code_HXT[0, 0])
    logits_HGT = torch.empty(H, G, code_HXT.shape[2])
    arguments = (
        plain(query_HGD), flat(code_HXT), code_HXT.stride(0), code_HXT.stride(1), plain(basis.mean_HD),
        plain(basis.query_HWCD), loops.F(scale), logits_HGT.numpy(),
    )  # fmt: skip
    by_heads(lambda begin, end: loops.scan(begin, end, *arguments), H, SCAN * code_HXT.numel() * G)
    return logits_HGT


def choose_likeliest(logits_HGT: torch.Tensor, budget: int, *, rest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.choose_likeliest`; `logits_HGT` must be contiguous.

    Weights have float32's rounding, and those below its normal numbers are 0 and tie.
    """
    check_choice(logits_HGT, budget)
    H, G, _ = logits_HGT.shape
    index_HK, unread_HG = torch.empty(H, budget, dtype=torch.int32), torch.empty(H, G)
    arguments = logits_HGT.numpy(), loops.F(rest), index_HK.numpy(), unread_HG.numpy()
    by_heads(lambda begin, end: loops.choose(begin, end, *arguments), H, CHOOSE * logits_HGT.numel())
    return index_HK, unread_HG
