"""Choosing keys by their codes on a CPU, compiled: one call for a whole batch."""

import torch

from sfi_kernels.code_scan.codes import KEPT, BatchCodes, Choice, CodeBasis, words
from sfi_kernels.code_scan.reference import append_new, check, check_basis, check_codes
from sfi_kernels.compiled import by_heads
from sfi_kernels.loops import codes as loops
from sfi_kernels.loops.vectors import F
from sfi_kernels.numpy_views import KINDS, pages_of, plain
from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.step_descriptor import FAST, LENGTH, MODE, StepDescriptor

NUMBER = 2e-3  # microseconds of a key and query, on a Zen 4
MANY = 16  # keys that a matrix product codes sooner than a loop


def encode_keys(key_HTD: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    """See `reference.encode_keys`."""
    check_basis(key_HTD, basis)
    H, T, D = key_HTD.shape
    word_HWT = torch.empty(H, words(D), T, dtype=torch.int32)
    if T < MANY:
        loops.encode(plain(key_HTD), plain(basis.mean_HD), plain(basis.encode_HWDC), word_HWT.numpy())
    else:
        step_HTC = (key_HTD.float() - basis.mean_HD[:, None]).bmm(basis.encode_HDC)
        loops.pack_levels(plain(step_HTC), word_HWT.numpy())
    return word_HWT


def code_tokens(
    key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes
) -> None:
    """See `reference.code_tokens`. Pages must be `numpy_views.readable`; no request may be fast."""
    check_codes(key_PHND, block_table_BP, descriptor, codes)
    B, H = codes.summed_BH.shape
    nothing_BH, nothing_BHX = torch.empty(B, H, dtype=torch.int32), torch.empty(B, H, 0, dtype=torch.int32)
    _run(
        torch.empty(B, H, 0, key_PHND.shape[3]), key_PHND, key_PHND, block_table_BP, descriptor, codes,
        nothing_BHX, nothing_BH, nothing_BHX, codes.sum_BHE[..., :0], codes.sum_BHE, codes.sum_BHE[..., :0], 1.0, 0.0,
    )  # fmt: skip


def code_scan(
    query_BHGD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes,
    position_BHS: torch.Tensor, length_BH: torch.Tensor, *, budget: int, scale: float, rest: float,
    diagnoses: bool = False,
) -> Choice:  # fmt: skip
    """See `reference.code_scan`. Pages must be `numpy_views.readable`; weights have float32's rounding."""
    check(query_BHGD, key_PHND, value_PHNE, block_table_BP, descriptor, codes, position_BHS, length_BH)
    B, H, G, _ = query_BHGD.shape
    for row, numbers in enumerate(descriptor.table_BX.tolist()):
        if numbers[MODE] == FAST:
            codes.recent_BHXGD[row, :, (numbers[LENGTH] - 1) % KEPT] = query_BHGD[row]
    index_BHK = torch.full((B, H, budget), -1, dtype=torch.int32)
    pseudo = PseudoToken(torch.full((B, H, G), -torch.inf), torch.zeros_like(codes.sum_BHE))
    unread_BHC = torch.tensor([0.0, torch.nan] if diagnoses else []).repeat(B, H, 1)
    _run(
        query_BHGD, key_PHND, value_PHNE, block_table_BP, descriptor, codes, position_BHS, length_BH, index_BHK,
        *pseudo, unread_BHC, scale, rest,
    )  # fmt: skip
    diagnostics = {"unread_estimate": unread_BHC[..., 0], "score_margin": unread_BHC[..., 1]} if diagnoses else {}
    return Choice(index_BHK, pseudo, diagnostics)


def _run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, descriptor: StepDescriptor,
    codes: BatchCodes, position: torch.Tensor, length: torch.Tensor, index: torch.Tensor, logit: torch.Tensor,
    mean: torch.Tensor, unread: torch.Tensor, scale: float, rest: float,
) -> None:  # fmt: skip
    append_new(key, table, descriptor)
    written = *codes[:-1], position, length, index, logit, mean, unread
    arguments = (
        plain(query), *pages_of(key, value), KINDS[key.dtype], key.shape[2], table.numpy(),
        descriptor.table_BX.numpy(), *(part.numpy() for part in written), F(scale), F(rest),
    )  # fmt: skip
    work = NUMBER * codes.word_BHWT.numel() * query.shape[2]
    by_heads(lambda begin, end: loops.code_scan(begin, end, *arguments), query.shape[1], work)
