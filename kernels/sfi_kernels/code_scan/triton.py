"""Choosing keys by their codes in Triton: three launches for a whole batch, the same at every step."""

from typing import Any

import torch
import triton

from sfi_kernels.attention_tile import check_width, padded
from sfi_kernels.code_scan.choice_triton import COLUMNS
from sfi_kernels.code_scan.choice_triton import _code_scan_choose_kernel as choose
from sfi_kernels.code_scan.choice_triton import _code_scan_score_kernel as score
from sfi_kernels.code_scan.codes import SLOTS, BatchCodes, Choice, CodeBasis, words
from sfi_kernels.code_scan.encode_triton import KEYS
from sfi_kernels.code_scan.encode_triton import _encode_keys_kernel as encode
from sfi_kernels.code_scan.reference import check, check_basis, check_codes
from sfi_kernels.code_scan.sums_triton import BINS
from sfi_kernels.code_scan.sums_triton import _code_scan_sums_kernel as sums
from sfi_kernels.launch import launch, target
from sfi_kernels.pages import kernel_strides
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.step_descriptor import StepDescriptor

LOGITS = 4096  # of a program: keys times query heads
MOST_KEYS = 1024  # of a program
MIN_CHUNKS = 64  # one kernel for all capacities up to 64K
RESIDENT = 4  # programs of the first launch that fit a processor
# so that they do, a thread has 128 registers, of which 16 query heads would spill; left alone, it takes more
REGISTERS, MORE_REGISTERS, MANY_HEADS = 128, 168, 16


def encode_keys(key_HTD: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    """See `reference.encode_keys`. D up to 256."""
    check_basis(key_HTD, basis)
    H, T, D = key_HTD.shape
    check_width(D)
    if key_HTD.stride(2) != 1:
        key_HTD = key_HTD.contiguous()
    W = words(D)
    word_HWT = key_HTD.new_empty(H, W, T, dtype=torch.int32)
    launch(
        encode, (triton.cdiv(T, KEYS), H), key_HTD, basis.mean_HD.contiguous(),
        basis.encode_HDC.contiguous(), word_HWT, T, key_HTD.stride(0), key_HTD.stride(1),
        W=W, D=D, BLOCK_T=KEYS, BLOCK_D=padded(D), num_warps=8,
    )  # fmt: skip
    return word_HWT


def code_tokens(
    key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes
) -> None:
    """See `reference.code_tokens`. D up to 256."""
    check_codes(key_PHND, block_table_BP, descriptor, codes)
    empty = codes.sum_BHE
    value_PHNE = key_PHND if descriptor.new is None else descriptor.new.value_PHNE
    _sum(
        0, empty, key_PHND, value_PHNE, block_table_BP, descriptor, codes, (*[empty] * 4, codes.summed_BH), 1.0,
        0, G=1, BLOCK_G=1, CHUNK=1, CHOOSE=False,
    )  # fmt: skip


def code_scan(
    query_BHGD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes,
    position_BHS: torch.Tensor, length_BH: torch.Tensor, *, budget: int, scale: float, rest: float,
    diagnoses: bool = False,  # noqa: ARG001 - one signature for all backends
) -> Choice:  # fmt: skip
    """See `reference.code_scan`. D and E up to 256; the pseudo token's logits are in parts, one a chunk."""
    check(query_BHGD, key_PHND, value_PHNE, block_table_BP, descriptor, codes, position_BHS, length_BH)
    (B, H, G, _), W, capacity = query_BHGD.shape, *codes.word_BHWT.shape[2:]
    table, chunk = descriptor.table_BX, min(MOST_KEYS, LOGITS // triton.next_power_of_2(G))
    chunks, pairs = triton.cdiv(capacity, chunk), B * H

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return query_BHGD.new_empty(B, H, *shape, dtype=dtype)

    factor, logit_BHGT, lse, log_sum_BHG = empty(1 + SLOTS * W, G), empty(G, capacity), empty(chunks, G), empty(G)
    counts, columns = (empty(*shape, dtype=torch.int32) for shape in ((BINS.value,), (chunks, COLUMNS.value)))
    score_BHT, index_BHK = empty(capacity, dtype=torch.uint8), empty(budget, dtype=torch.int32)
    pseudo = PseudoToken(empty(G, chunks), torch.empty_like(codes.sum_BHE))
    common = {"G": G, "BLOCK_G": triton.next_power_of_2(G), "CHUNK": chunk}
    _sum(
        chunks, query_BHGD.contiguous(), key_PHND, value_PHNE, block_table_BP, descriptor, codes,
        (pseudo.value_BHE, factor, logit_BHGT, lse, counts), scale, budget, **common, CHOOSE=True,
    )  # fmt: skip
    launch(
        score, (chunks, pairs), table, logit_BHGT, lse, counts, columns, score_BHT, log_sum_BHG, capacity, budget,
        H=H, **common,
    )  # fmt: skip
    launch(
        choose, (chunks, pairs), table, logit_BHGT, lse, counts, columns, score_BHT, log_sum_BHG, index_BHK,
        position_BHS, length_BH, pseudo.logit_BHG, capacity, budget, position_BHS.shape[2],
        float(rest), H=H, BLOCK_CHUNKS=max(MIN_CHUNKS, triton.next_power_of_2(chunks)), **common,
    )  # fmt: skip
    return Choice(index_BHK, pseudo, {})


def _sum(
    chunks: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_table: torch.Tensor,
    descriptor: StepDescriptor, codes: BatchCodes, made: tuple[torch.Tensor, ...], scale: float, budget: int,
    **constants: Any,
) -> None:  # fmt: skip
    (_, H, page_size, D), E, (B, _, W, capacity) = key.shape, value.shape[3], codes.word_BHWT.shape
    new = descriptor.new
    rows, norm = (new[:2], new.norm_PHN) if new else ((key, value), codes.sum_BHE)
    check_width(max(D, E))
    # a program projects its query once; as many programs as fit at once share the chunks
    each = max(1, triton.cdiv(chunks * B * H, RESIDENT * target(key.device).processors))
    launch(
        sums, (1 + triton.cdiv(chunks, each), B * H), query, key, value, *rows, norm, block_table,
        descriptor.table_BX, *codes, *made, chunks, each, scale, block_table.shape[1], capacity, budget,
        rows[0].shape[2], *(stride for part in rows for stride in part.stride()[:3]),
        KEY_STRIDES=kernel_strides(key, "key"), VALUE_STRIDES=kernel_strides(value, "value"), H=H, D=D, E=E, W=W,
        PAGE=page_size, BLOCK_D=padded(D), BLOCK_E=padded(E),
        APPENDS=new is not None, **constants,
        max_registers=REGISTERS if constants["BLOCK_G"] < MANY_HEADS else MORE_REGISTERS,
    )  # fmt: skip
