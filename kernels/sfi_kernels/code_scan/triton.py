"""Choosing keys by their codes in Triton: three launches for a whole batch, the same at every step."""

from typing import Any

import torch
import triton

from sfi_kernels.attention_tile.shape import check_width, padded
from sfi_kernels.code_scan.choice_triton import COLUMNS
from sfi_kernels.code_scan.choice_triton import _code_scan_choose_kernel as choose
from sfi_kernels.code_scan.choice_triton import _code_scan_score_kernel as score
from sfi_kernels.code_scan.reference import BatchCodes, Choice, check, check_codes
from sfi_kernels.code_scan.sums_triton import BINS
from sfi_kernels.code_scan.sums_triton import _code_scan_sums_kernel as sums
from sfi_kernels.decode_attention.query_tile import REGISTERS
from sfi_kernels.key_codes.layout import SLOTS
from sfi_kernels.launch import launch
from sfi_kernels.pages import kernel_strides
from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.step_descriptor import StepDescriptor

LOGITS = 4096  # of a program: keys times query heads
MOST_KEYS = 1024  # of a program
MIN_CHUNKS = 64  # one kernel for all capacities up to 64K
PROGRAM: Any = {"num_warps": 8, "max_registers": REGISTERS}


def code_tokens(
    key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes
) -> None:
    """See `reference.code_tokens`. D up to 256."""
    check_codes(key_PHND, block_table_BP, descriptor, codes)
    empty = codes.sum_BHE
    launch(
        sums, (1, codes.word_BHWT[:, :, 0, 0].numel()), empty, key_PHND, key_PHND, block_table_BP,
        descriptor.table_BX, *codes, empty, empty, empty, codes.summed_BH, 1.0,
        block_table_BP.shape[1], codes.word_BHWT.shape[3], 0,
        **_constants(key_PHND, key_PHND, codes), G=1, BLOCK_G=1, BLOCK_M=padded(1),
        CHUNK=1, CHOOSE=False, **PROGRAM,
    )  # fmt: skip


def code_scan(
    query_BHGD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes,
    position_BHS: torch.Tensor, length_BH: torch.Tensor, *, budget: int, scale: float, rest: float,
    told: bool = False,  # noqa: ARG001 - one signature for all backends
) -> Choice:  # fmt: skip
    """See `reference.code_scan`. D and E up to 256; the pseudo token's logits are in parts, one a chunk."""
    check(query_BHGD, key_PHND, value_PHNE, block_table_BP, descriptor, codes, position_BHS, length_BH)
    (B, H, G, _), W, capacity = query_BHGD.shape, *codes.word_BHWT.shape[2:]
    table, chunk = descriptor.table_BX, min(MOST_KEYS, LOGITS // triton.next_power_of_2(G))
    chunks, pairs = triton.cdiv(capacity, chunk), B * H

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return query_BHGD.new_empty(B, H, *shape, dtype=dtype)

    factor, lse, log_sum_BHG = empty(1 + SLOTS * W, G), empty(chunks, G), empty(G)
    counts, columns = (empty(*shape, dtype=torch.int32) for shape in ((BINS.value,), (chunks, COLUMNS.value)))
    score_BHT, index_BHK = empty(capacity, dtype=torch.uint8), empty(budget, dtype=torch.int32)
    pseudo = PseudoToken(empty(G, chunks), torch.empty_like(codes.sum_BHE))
    common = {"G": G, "BLOCK_G": triton.next_power_of_2(G), "CHUNK": chunk, **PROGRAM}
    launch(
        sums, (1 + chunks, pairs), query_BHGD.contiguous(), key_PHND, value_PHNE, block_table_BP, table,
        *codes, pseudo.value_BHE, factor, lse, counts, scale, block_table_BP.shape[1], capacity, budget,
        **_constants(key_PHND, value_PHNE, codes), **common, BLOCK_M=padded(G), CHOOSE=True,
    )  # fmt: skip
    launch(
        score, (chunks, pairs), table, codes.word_BHWT, factor, lse, counts, columns, score_BHT,
        log_sum_BHG, capacity, budget, H=H, W=W, **common,
    )  # fmt: skip
    launch(
        choose, (chunks, pairs), table, codes.word_BHWT, factor, counts, columns, score_BHT, log_sum_BHG,
        index_BHK, position_BHS, length_BH, pseudo.logit_BHG, capacity, budget, position_BHS.shape[2],
        float(rest), H=H, W=W, BLOCK_CHUNKS=max(MIN_CHUNKS, triton.next_power_of_2(chunks)), **common,
    )  # fmt: skip
    return Choice(index_BHK, pseudo)


def _constants(key: torch.Tensor, value: torch.Tensor, codes: BatchCodes) -> dict[str, Any]:
    (_, H, page_size, D), E = key.shape, value.shape[3]
    check_width(max(D, E))
    return {
        "KEY_STRIDES": kernel_strides(key, "key"), "VALUE_STRIDES": kernel_strides(value, "value"),
        "H": H, "D": D, "E": E, "W": codes.word_BHWT.shape[2], "PAGE": page_size,
        "BLOCK_D": padded(D), "BLOCK_E": padded(E),
    }  # fmt: skip
