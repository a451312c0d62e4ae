"""Ops on a CPU, compiled: what checks the operands, and calls numba's `loops` over them.

Pages must be `compiled.readable`; sums are of float32.
"""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from sfi_kernels.choice import Choice
from sfi_kernels.code_scan import reference as scanning
from sfi_kernels.code_scan.codes import BatchCodes, CodeBasis, words
from sfi_kernels.compiled import KINDS, NO_PAGES, by_heads, check_readable, pages_of, plain
from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.decode_attention import reference as decoding
from sfi_kernels.decode_attention.reference import DecodeAttention
from sfi_kernels.dense_attention import reference as dense
from sfi_kernels.loops import attention, products, selection
from sfi_kernels.loops import codes as code_loops
from sfi_kernels.loops.vectors import F
from sfi_kernels.pack import append
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.selector import reference as selecting
from sfi_kernels.selector.formulas import Gather, factor_everywhere
from sfi_kernels.step_descriptor import FAST, LENGTH, MODE, QUERIES, SLOT, SLOW, START, StepDescriptor
from sfi_kernels.tables import BLOCK, FEW_OF_BLOCKS, IN, KIND, OUT, PIECE

# microseconds: of a query's number and row in attention, of a key and query, of a logit, of a weight by kind
ATTENDED, SCANNED, SELECTED = 3e-4, 2e-3, 5e-3
MULTIPLIED = {0: 2.3e-4, 1: 1.2e-4, 2: 1.2e-4, BLOCK: 6e-5}


def sparse_attention(
    query_BHGD: torch.Tensor, packed_key_BHSD: torch.Tensor, packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, recent_start_B: torch.Tensor, length_B: torch.Tensor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None, pseudo: PseudoToken | None = None,
    position_BHS: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `reference.sparse_attention`: each row is read once, packed or where it lies in its page."""
    segment, S = NO_PAGES, 0
    if position_BHS is None:
        check_readable(packed_key_BHSD, packed_value_BHSE)
        segment, S = pages_of(packed_key_BHSD, packed_value_BHSE), packed_key_BHSD.shape[2]
        position_BHS = packed_length_BH.new_empty(*packed_length_BH.shape, 0)
    tensors = position_BHS, packed_length_BH, block_table_BP, recent_start_B, length_B
    rows = np.arange(len(length_B)), *(part.numpy() for part in tensors)
    tokens = max(S, position_BHS.shape[2])  # and recent ones, which are fewer
    out_BH1GE = _attend(
        query_BHGD[:, :, None], key_PHND, value_PHNE, rows, tokens, scale, soft_cap, sink_HG,
        torch.empty(0, 0, 0, 0), segment, S, pseudo,
    )  # fmt: skip
    return out_BH1GE[:, :, 0]


def dense_attention(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    length_B: torch.Tensor, *, scale: float, soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `reference.dense_attention`. Time is in proportion to the queries."""
    logits_BHGT = torch.empty(0, 0, 0, 0)
    return _dense(query_BHGWD, key_PHND, value_PHNE, block_table_BP, length_B, scale, soft_cap, sink_HG, logits_BHGT)


def dense_attention_with_logits(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    length_B: torch.Tensor, *, scale: float, soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `reference.dense_attention_with_logits`."""
    logits_BHGT = torch.full((*query_BHGWD.shape[:3], int(length_B.max())), -torch.inf)
    out = _dense(query_BHGWD, key_PHND, value_PHNE, block_table_BP, length_B, scale, soft_cap, sink_HG, logits_BHGT)
    return out, logits_BHGT[:, :, :, None]


def _dense(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    length_B: torch.Tensor, scale: float, soft_cap: float | None, sink_HG: torch.Tensor | None,
    logits_BHGT: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    dense.check(query_BHGWD, key_PHND, block_table_BP, length_B, value_PHNE, sink_HG)
    B, H = query_BHGWD.shape[:2]
    unpacked = np.full(B, -1), np.empty((1, H, 0), np.int32), np.zeros((1, H), np.int32)
    rows = *unpacked, block_table_BP.numpy(), np.zeros(B, np.int32), length_B.numpy()
    query_BHWGD, tokens = query_BHGWD.transpose(2, 3), int(length_B.max())
    out_BHWGE = _attend(query_BHWGD, key_PHND, value_PHNE, rows, tokens, scale, soft_cap, sink_HG, logits_BHGT)
    return out_BHWGE.transpose(2, 3)


def _attend(
    query_BHWGD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, rows: tuple[Any, ...],
    tokens: int, scale: float, soft_cap: float | None, sink_HG: torch.Tensor | None, logits_BHGT: torch.Tensor,
    segment: tuple[Any, ...] = NO_PAGES, S: int = 0, pseudo: PseudoToken | None = None,
) -> torch.Tensor:  # fmt: skip
    # `rows`: slot, positions of packed tokens and how many count by slot, block table, first recent token, length
    check_readable(key_PHND, value_PHNE)
    B, H, W, G, _ = query_BHWGD.shape
    out_BHWGE, nothing_BHX = torch.empty(B, H, W, G, value_PHNE.shape[3]), np.empty((0, 0, 0), F)
    arguments = (
        plain(query_BHWGD), pages_of(key_PHND, value_PHNE), segment, KINDS[key_PHND.dtype], key_PHND.shape[2], S,
        *rows, F(scale), F(soft_cap or 0),
        np.empty((0, 0), F) if sink_HG is None else plain(sink_HG),
        *([nothing_BHX] * 2 if pseudo is None else map(plain, pseudo)), out_BHWGE.numpy(), logits_BHGT.numpy(),
    )  # fmt: skip
    work = ATTENDED * query_BHWGD.numel() * tokens
    by_heads(lambda begin, end: attention.attend(begin, end, *arguments), H, work)
    return out_BHWGE.to(query_BHWGD.dtype)


def decode_attention(
    query_BHGWD: torch.Tensor, packed_key_BHSD: torch.Tensor, packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    descriptor: StepDescriptor, *, scale: float, soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
    evidence: bool = False, into: None = None, out: torch.Tensor | None = None, dense_BH: None = None,
    pseudo: PseudoToken | None = None, position_BHS: torch.Tensor | None = None, ring: None = None,
) -> DecodeAttention:  # fmt: skip
    """See `reference.decode_attention`; a query each, no mixed heads, no ring, and of the evidence the logits alone."""
    decoding.check(query_BHGWD, packed_key_BHSD, packed_value_BHSE, packed_length_BH, key_PHND, value_PHNE,
          block_table_BP, descriptor, sink_HG, dense_BH, pseudo, position_BHS, ring, out)  # fmt: skip
    if query_BHGWD.shape[3] != 1 or (into, dense_BH, ring) != (None, None, None):
        raise ValueError("numba attends with one query of a request, and takes no into, dense heads or ring")
    shape, words, logits = (*query_BHGWD.shape[:4], value_PHNE.shape[3]), descriptor.table_BX.numpy(), None
    out = query_BHGWD.new_zeros(shape) if out is None else out.zero_()
    wanted = descriptor.slow if evidence else ()
    others = [row for row, mode in enumerate(words[:, MODE].tolist()) if mode == SLOW and row not in wanted]
    segment, S = NO_PAGES, 0
    if position_BHS is None:
        segment, S = pages_of(packed_key_BHSD, packed_value_BHSE), packed_key_BHSD.shape[2]
        position_BHS = packed_length_BH.new_empty(*packed_length_BH.shape, 0)
    for rows in filter(None, (descriptor.fast, wanted, others)):
        fast, evidence_RHGT = rows is descriptor.fast, torch.empty(0, 0, 0, 0)
        which = slice(None) if len(rows) == len(words) else [*rows]
        start_R, length_R = words[which, START].copy(), words[which, LENGTH].copy()
        slot_R = words[which, SLOT].astype(np.int64) if fast else np.full(len(rows), -1)
        tokens = max(S, position_BHS.shape[2]) if fast else int(length_R.max())
        if rows is wanted:
            evidence_RHGT = torch.full((len(rows), *shape[1:3], tokens), -torch.inf)
            logits = evidence_RHGT[:, :, :, None]
        packed = slot_R, position_BHS.numpy(), packed_length_BH.numpy()
        out[which] = _attend(
            query_BHGWD[which].transpose(2, 3), key_PHND, value_PHNE,
            (*packed, block_table_BP.numpy()[which], start_R, length_R), tokens, scale, soft_cap, sink_HG,
            evidence_RHGT, segment, S,
            PseudoToken(*(part[which] for part in pseudo)) if fast and pseudo is not None else None,
        ).transpose(2, 3)  # fmt: skip
    return DecodeAttention(out, logits)


def encode_keys(key_HTD: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    """See `reference.encode_keys`."""
    scanning.check_basis(key_HTD, basis)
    H, T, D = key_HTD.shape
    word_HWT = torch.empty(H, words(D), T, dtype=torch.int32)
    step_HTC = (key_HTD.float() - basis.mean_HD[:, None]).bmm(basis.encode_HDC)
    code_loops.pack_levels(plain(step_HTC), word_HWT.numpy())
    return word_HWT


def code_tokens(
    key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes,
    query_BHGD: torch.Tensor | None = None, pseudo: PseudoToken | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """See `reference.code_tokens`."""
    scanning.check_codes(key_PHND, block_table_BP, descriptor, codes)
    scanning.append_new(key_PHND, block_table_BP, descriptor, append.reference)
    B, H = descriptor.batch, codes.summed_BH.shape[1]
    if query_BHGD is not None:
        scanning.keep_queries(query_BHGD, descriptor, codes, pseudo, scale)
    table_BX = descriptor.table_BX.clone()
    table_BX[:, MODE].masked_fill_(table_BX[:, MODE] == FAST, SLOW)  # so that nothing is chosen
    nothing_BH, nothing_BHX = torch.empty(B, H, dtype=torch.int32), torch.empty(B, H, 0, dtype=torch.int32)
    empty_BHE = codes.sum_BHE[..., :0]
    _scan(
        torch.empty(B, H, 0, key_PHND.shape[3]), key_PHND, key_PHND, block_table_BP, table_BX, codes,
        nothing_BHX, nothing_BH, nothing_BHX, empty_BHE, empty_BHE, empty_BHE, 1.0, 0.0,
    )  # fmt: skip


def code_scan(
    query_BHGD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes,
    position_BHS: torch.Tensor, length_BH: torch.Tensor, *, budget: int, scale: float, rest: float,
    diagnoses: bool = False, early: bool = False,
) -> Choice:  # fmt: skip
    """See `reference.code_scan`."""
    scanning.check(query_BHGD, key_PHND, value_PHNE, block_table_BP, descriptor, codes, position_BHS, length_BH)
    (B, H, G, _), table_BX = query_BHGD.shape, descriptor.table_BX
    if early:
        table_BX, codes = table_BX.clone(), codes._replace(mean_BHD=torch.zeros_like(codes.mean_BHD))
        table_BX[:, QUERIES] = 0  # so that nothing is coded
    else:
        scanning.append_new(key_PHND, block_table_BP, descriptor, append.reference)
        scanning.keep_queries(query_BHGD, descriptor, codes)
    index_BHK = torch.full((B, H, budget), -1, dtype=torch.int32)
    pseudo = PseudoToken(torch.full((B, H, G), -torch.inf), torch.zeros(B, H, codes.sum_BHE.shape[2]))
    unread_BHC = torch.tensor([0.0, torch.nan]).repeat(B, H, 1) if diagnoses else torch.empty(B, H, 0)
    _scan(
        query_BHGD, key_PHND, value_PHNE, block_table_BP, table_BX, codes, position_BHS, length_BH, index_BHK,
        *pseudo, unread_BHC, scale, rest,
    )  # fmt: skip
    diagnostics = {"unread_estimate": unread_BHC[..., 0], "score_margin": unread_BHC[..., 1]} if diagnoses else {}
    return Choice(index_BHK, pseudo, diagnostics)


def _scan(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, table_BX: torch.Tensor,
    codes: BatchCodes, position: torch.Tensor, length: torch.Tensor, index: torch.Tensor, logit: torch.Tensor,
    mean: torch.Tensor, unread: torch.Tensor, scale: float, rest: float,
) -> None:  # fmt: skip
    written = *codes[:-1], position, length, index, logit, mean, unread
    arguments = (
        plain(query), *pages_of(key, value), KINDS[key.dtype], key.shape[2], table.numpy(),
        table_BX.numpy(), *(part.numpy() for part in written), F(scale), F(rest),
    )  # fmt: skip
    work = SCANNED * codes.word_BHWT.numel() * query.shape[2]
    by_heads(lambda begin, end: code_loops.code_scan(begin, end, *arguments), query.shape[1], work)


def selector(
    logits_BHGWT: torch.Tensor, key_norm_BHT: torch.Tensor, allowed_BT: torch.Tensor | None, *, alpha: float,
    gamma: float, beta: float, power: float, eta: float, lambda_clip: float, alpha_soft: float, radius: int,
    alpha_cross: float, temperature: float, span: int = 0, log_sum_BHGW: torch.Tensor | None = None,
    diagnostics: dict[str, torch.Tensor] | None = None, gather: Gather | None = None,
    interval: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `reference.selector`. J must be an interval, of float32 logits and norms, and the heads all of them."""
    selecting.check(
        logits_BHGWT, key_norm_BHT, allowed_BT, log_sum_BHGW, interval, alpha, lambda_clip, temperature, span, radius
    )
    B, H, G, W, T = logits_BHGWT.shape
    if gather is not None or (interval is None and allowed_BT is not None):
        raise ValueError("interval must be given to numba, and no gather")
    first, stop = interval or (0, T)
    place_1N = factor_everywhere(stop - first, logits_BHGWT.device, beta, power, eta)
    score_BHT = torch.full((B, H, T), MASKED_SCORE)
    lambda_BH, note_BHX = torch.empty(B, H), torch.empty(0 if diagnostics is None else B, H, len(selecting.NOTES))
    sums = np.empty((0, 0, 0), F) if span or log_sum_BHGW is None else plain(log_sum_BHGW).reshape(B, H, G * W)
    arguments = (
        plain(logits_BHGWT).reshape(B, H, G * W, T), sums, plain(key_norm_BHT), plain(place_1N)[0], first, span,
        F(alpha), F(gamma), F(lambda_clip), F(alpha_soft), radius, F(alpha_cross), F(temperature),
        score_BHT.numpy(), lambda_BH.numpy(), note_BHX.numpy(),
    )  # fmt: skip
    by_heads(lambda begin, end: selection.select(begin, end, *arguments), B, SELECTED * logits_BHGWT.numel())
    if diagnostics is not None:
        diagnostics.update(zip(selecting.NOTES, note_BHX.unbind(-1), strict=True))
    return score_BHT, lambda_BH


def multiply(matrix: Any, x_RI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Return rows times a matrix of blocks, [R, O] float32; `matrix` is its row (`sfi_kernels.tables`), with the bias.

    More than `FEW_OF_BLOCKS` rows are multiplied by pieces of the matrix that become float32 one after the other.
    """
    if len(x_RI) <= FEW_OF_BLOCKS:
        return multiply_few(matrix, x_RI)
    count, x_RI = int(matrix[OUT]), x_RI.detach()
    out_RO = x_RI.new_empty(len(x_RI), count)
    for start in range(0, count, PIECE):
        rows = slice(start, min(start + PIECE, count))
        bias = None if bias_O is None else bias_O.detach()[rows]
        out_RO[:, rows] = linear(x_RI, widen(matrix, torch.arange(rows.start, rows.stop)), bias)
    return out_RO


def multiply_few(matrix: Any, x_RI: torch.Tensor) -> torch.Tensor:
    """Return a few rows times a matrix of any kind, [R, O] float32, with the matrix' bias."""
    out_RO = torch.empty(len(x_RI), matrix[OUT])
    rows, out = plain(x_RI), out_RO.numpy()
    work = MULTIPLIED.get(matrix[KIND], MULTIPLIED[BLOCK]) * int(matrix[OUT] * matrix[IN]) * len(x_RI)
    by_heads(lambda begin, end: products.linear(begin, end, matrix, rows, out), int(matrix[OUT]), work)
    return out_RO


def widen(matrix: Any, row_N: torch.Tensor) -> torch.Tensor:
    """Return some rows of a matrix of blocks as float32, [N, I]; `row_N` has their numbers, int64."""
    out_NI = torch.empty(len(row_N), matrix[IN])
    row, out = row_N.numpy(), out_NI.numpy()
    work = MULTIPLIED[0] * out_NI.numel()
    by_heads(lambda begin, end: products.widen_rows(begin, end, row, matrix, out), len(row), work)
    return out_NI
