"""Choosing keys by their codes, in PyTorch, request by request."""

from typing import NamedTuple

import torch

from sfi_kernels.append import append
from sfi_kernels.append.reference import check as check_append
from sfi_kernels.key_codes.layout import BITS, SHIFTS, SLOTS, CodeBasis, words
from sfi_kernels.key_codes.reference import choose_likeliest
from sfi_kernels.pages import read_pages
from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.shapes import check_int32, check_pages, check_shape
from sfi_kernels.step_descriptor import (
    ALLOWED_START,
    ALLOWED_STOP,
    FAST,
    LENGTH,
    MODE,
    QUERIES,
    NewRows,
    StepDescriptor,
)

KEPT = 128  # tokens whose queries are kept for learning a basis again
TOLD = ("unread_estimate", "score_margin")  # the columns of `Choice.told_BHC`


class BatchCodes(NamedTuple):
    """The codes of a layer's cached keys and what they are made with, for every row of a batch.

    `mean_BHD`, `encode_BHWDC` and `query_BHWCD` are the rows' `CodeBasis`, float32, by word of 16 channels.
    `word_BHWT` are the codes, int32. `sum_BHE` is the sum of the values of J up to the position `summed_BH`,
    int32; 0 for no sum yet. `recent_BHXGD` are the queries of the last `KEPT` tokens, in a ring by position.
    """

    mean_BHD: torch.Tensor
    encode_BHWDC: torch.Tensor
    query_BHWCD: torch.Tensor
    word_BHWT: torch.Tensor
    sum_BHE: torch.Tensor
    summed_BH: torch.Tensor
    recent_BHXGD: torch.Tensor

    @classmethod
    def empty(
        cls, rows: int, group: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, capacity: int
    ) -> "BatchCodes":
        """Allocate for `rows` requests of at most `capacity` tokens and `group` query heads a KV head.

        No request has a basis yet.
        """
        (_, H, _, D), E, W = key_PHND.shape, value_PHNE.shape[3], words(key_PHND.shape[3])
        zeros = torch.zeros(0, device=key_PHND.device).new_zeros
        return cls(
            zeros(rows, H, D), zeros(rows, H, W, D, SLOTS), zeros(rows, H, W, SLOTS, D),
            zeros(rows, H, W, capacity, dtype=torch.int32), zeros(rows, H, E),
            zeros(rows, H, dtype=torch.int32),
            zeros(rows, H, KEPT, group, D, dtype=key_PHND.dtype),
        )  # fmt: skip

    def grown(self, capacity: int) -> "BatchCodes":
        """Return a copy for at least `capacity` tokens of a request."""
        more = capacity - self.word_BHWT.shape[3]
        return self._replace(word_BHWT=torch.nn.functional.pad(self.word_BHWT, (0, more)))

    def of(self, rows: slice) -> "BatchCodes":
        """Return some rows, over the same memory."""
        return BatchCodes(*(part[rows] for part in self))

    def learn(self, row: int, basis: CodeBasis) -> None:
        """Give a row its basis."""
        self.mean_BHD[row] = basis.mean_HD
        self.encode_BHWDC[row], self.query_BHWCD[row] = basis.encode_HWDC, basis.query_HWCD


class Choice(NamedTuple):
    """Chosen positions, `index_BHK`, int32, ascending, padded with -1, and the unread keys' pseudo token.

    Undefined for requests that are not fast. `told_BHC`, where asked for, has the estimated attention on the
    keys of J that are not read, and the score of the last key chosen over that of the first one left.
    """

    index_BHK: torch.Tensor
    pseudo: PseudoToken
    told_BHC: torch.Tensor | None = None


def code_tokens(
    key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes
) -> None:
    """Code the new keys of every request that decodes, in place of `codes.word_BHWT`.

    They are in the pages, or among the descriptor's `new` rows, which are appended first.
    """
    check_codes(key_PHND, block_table_BP, descriptor, codes)
    append_new(key_PHND, block_table_BP, descriptor)
    for row, own in enumerate(descriptor.table_BX.tolist()):
        if own[MODE] >= FAST:
            start, stop = own[LENGTH] - own[QUERIES], own[LENGTH]
            key_HTD = read_pages(key_PHND, block_table_BP[row], start, stop)[0]
            codes.word_BHWT[row, :, :, start:stop] = encoded(key_HTD, codes, row)


def code_scan(
    query_BHGD: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor,
    descriptor: StepDescriptor,
    codes: BatchCodes,
    position_BHS: torch.Tensor,
    length_BH: torch.Tensor,
    *,
    budget: int,
    scale: float,
    rest: float,
    told: bool = False,
) -> Choice:
    """Choose the likeliest keys of J for every fast request, by their codes, as `choose_likeliest` does.

    Where J has no more than `budget` keys, all are chosen. The new keys are coded, too (`code_tokens`),
    the values that have left the recent window are added to the sums, and the queries are kept.

    Args:
        query_BHGD: Queries of the step, one a request.
        key_PHND: Pages of keys; the new keys are there, or in the descriptor.
        value_PHNE: Pages of values.
        block_table_BP: Page numbers of each request, int32.
        descriptor: Modes, lengths and candidate sets.
        codes: Codes and sums, changed in place.
        position_BHS: Written for fast requests: their sinks, the chosen positions, then -1; int32.
        length_BH: Written for fast requests: how many positions there are, int32.
        budget: Keys to choose by KV head.
        scale: Factor on the products.
        rest: Factor on the estimated probability of the unread keys.
        told: Return the choice's `told_BHC`, too; Triton returns none.

    Returns:
        The choice. The pseudo token's value is the mean value of J.
    """
    check(query_BHGD, key_PHND, value_PHNE, block_table_BP, descriptor, codes, position_BHS, length_BH)
    code_tokens(key_PHND, block_table_BP, descriptor, codes)
    B, H, G, _ = query_BHGD.shape
    index_BHK = position_BHS.new_full((B, H, budget), -1)
    logit_BHG = query_BHGD.new_full((B, H, G), -torch.inf, dtype=torch.float32)
    value_BHE = torch.zeros_like(codes.sum_BHE)
    told_BHC = nothing_unread(B, H, query_BHGD.device) if told else None
    for row, own in enumerate(descriptor.table_BX.tolist()):
        if own[MODE] != FAST:
            continue
        codes.recent_BHXGD[row, :, (own[LENGTH] - 1) % KEPT] = query_BHGD[row]
        first, stop = own[ALLOWED_START], own[ALLOWED_STOP]
        count = stop - first
        value_BHE[row] = _mean_value(value_PHNE, block_table_BP[row], codes, row, first, stop)
        chosen = torch.arange(max(count, 0), device=index_BHK.device, dtype=torch.int32).expand(H, -1)
        if count > budget:
            logits_HGT = scanned(query_BHGD[row], codes, row, scale)[..., first:stop]
            chosen, logit_BHG[row] = choose_likeliest(logits_HGT, budget, rest=rest)
            if told_BHC is not None:
                told_BHC[row] = told_of(logits_HGT, chosen)
        K = chosen.shape[1]
        index_BHK[row, :, :K] = chosen + first
        position_BHS[row, :, :first] = torch.arange(first, dtype=torch.int32)
        position_BHS[row, :, first:] = -1
        position_BHS[row, :, first : first + K] = index_BHK[row, :, :K]
        length_BH[row] = first + K
    return Choice(index_BHK, PseudoToken(logit_BHG, value_BHE), told_BHC)


def told_of(logits_HGT: torch.Tensor, index_HK: torch.Tensor) -> torch.Tensor:
    """Return what `Choice.told_BHC` has of one request, [H, 2]."""
    score_HT = logits_HGT.float().softmax(-1).mean(1)
    left_HT = score_HT.scatter(1, index_HK.long(), 0.0)
    margin_H = score_HT.gather(1, index_HK.long()).amin(1) / left_HT.amax(1)
    return torch.stack([left_HT.sum(1), margin_H], 1)


def nothing_unread(B: int, H: int, device: torch.device) -> torch.Tensor:
    """Return what `Choice.told_BHC` has where everything is read."""
    return torch.tensor([0.0, torch.nan], device=device).repeat(B, H, 1)


def encoded(key_HTD: torch.Tensor, codes: BatchCodes, row: int) -> torch.Tensor:
    """Code keys by a row's basis, word_HWT."""
    centered_H1TD = (key_HTD.float() - codes.mean_BHD[row][:, None])[:, None]
    half_C, shift_C = _slots(key_HTD.device)
    level_HWTC = (centered_H1TD @ codes.encode_BHWDC[row]).floor() + half_C
    level_HWTC = level_HWTC.clamp_min(0).minimum(2 * half_C - 1).long()
    word_HWT = (level_HWTC << shift_C).sum(-1)
    return torch.where(word_HWT >= 1 << 31, word_HWT - (1 << 32), word_HWT).int()


def scanned(query_HGD: torch.Tensor, codes: BatchCodes, row: int, scale: float) -> torch.Tensor:
    """Estimate the logits of all keys of a row from their codes, [H, G, T] float32."""
    query_HGD = query_HGD.float() * scale
    half_C, shift_C = _slots(query_HGD.device)
    level_HWCT = (codes.word_BHWT[row][:, :, None].long() >> shift_C[:, None]) & (2 * half_C.long()[:, None] - 1)
    middle_HWCT = level_HWCT.float() + (0.5 - half_C)[:, None]
    factor_HWGC = query_HGD[:, None] @ codes.query_BHWCD[row].mT
    logits_HGT = (factor_HWGC @ middle_HWCT).sum(1)
    return logits_HGT + query_HGD @ codes.mean_BHD[row][:, :, None]


def _slots(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # 2^(bits - 1) and the first bit of a word's slots
    half_C = torch.tensor([2.0 ** (bits - 1) for bits in BITS], device=device)
    return half_C, torch.tensor(SHIFTS, device=device)


def _mean_value(
    value_PHNE: torch.Tensor, table_P: torch.Tensor, codes: BatchCodes, row: int, first: int, stop: int
) -> torch.Tensor:
    # of J, [H, E]; the sum takes the values in that have left the recent window since
    known = int(codes.summed_BH[row, 0])
    start = known or first
    if stop > start:
        new_HE = read_pages(value_PHNE, table_P, start, stop)[0].float().sum(1)
        codes.sum_BHE[row] = codes.sum_BHE[row] + new_HE if known else new_HE
    elif not known:
        codes.sum_BHE[row] = 0
    codes.summed_BH[row] = max(start, stop)
    return codes.sum_BHE[row] / max(1, max(start, stop) - first)


def check_codes(
    key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes
) -> None:
    """Raise the errors of `code_tokens`."""
    check_shape(key_PHND, "key", P=None, H=None, N=None, D=None)
    (_, H, _, D), B = key_PHND.shape, descriptor.batch
    check_shape(codes.word_BHWT, "words", B=B, H=H, W=None, T=None)
    W = codes.word_BHWT.shape[2]
    check_shape(codes.mean_BHD, "mean", B=B, H=H, D=D)
    check_shape(codes.encode_BHWDC, "encode", B=B, H=H, W=W, D=D, C=SLOTS)
    check_shape(codes.query_BHWCD, "query_basis", B=B, H=H, W=W, C=SLOTS, D=D)
    check_shape(block_table_BP, "block_table", B=B, P=None)
    numbers = {"words": codes.word_BHWT, "summed": codes.summed_BH, "block_table": block_table_BP}
    check_int32(key_PHND.device, **numbers)
    if descriptor.new is not None:
        check_append(*_appended(key_PHND, block_table_BP, descriptor, descriptor.new))


def append_new(key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor) -> None:
    """Append the descriptor's `new` rows, if it has any."""
    if descriptor.new is not None:
        append.reference(*_appended(key_PHND, block_table_BP, descriptor, descriptor.new))


def _appended(
    key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor, new: NewRows
) -> tuple[torch.Tensor, ...]:
    # the arguments of `append`
    which = descriptor.append_start_B, descriptor.append_count_B
    return *new[:2], *which, key_PHND, new.value_PHNE, new.norm_PHN, block_table_BP


def check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor,
    descriptor: StepDescriptor, codes: BatchCodes, position: torch.Tensor, length: torch.Tensor,
) -> None:  # fmt: skip
    """Raise the errors of `code_scan`."""
    check_codes(key, table, descriptor, codes)
    (_, H, N, D), B = key.shape, descriptor.batch
    check_shape(query, "query", B=B, H=H, G=None, D=D)
    check_shape(value, "value", P=key.shape[0], H=H, N=N, E=None)
    check_shape(codes.sum_BHE, "sum", B=B, H=H, E=value.shape[3])
    check_shape(codes.summed_BH, "summed", B=B, H=H)
    check_shape(position, "position", B=B, H=H, S=None)
    check_shape(length, "length", B=B, H=H)
    check_pages(query, "query", key=key, value=value)
    check_int32(query.device, position=position, length=length)
