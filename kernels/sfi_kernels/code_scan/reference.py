"""Choosing keys by their codes, in PyTorch, request by request."""

from collections.abc import Callable
from functools import cache

import torch

from sfi_kernels import step_descriptor as step
from sfi_kernels.choice import Choice, write_row
from sfi_kernels.code_scan.codes import (
    BITS,
    DROPPED,
    KEPT,
    LOWEST,
    SHIFTS,
    SLOTS,
    BatchCodes,
    CodeBasis,
    by_word,
    words,
)
from sfi_kernels.op import check_int32, check_pages, check_shapes
from sfi_kernels.pack import append
from sfi_kernels.pack.reference import check_append
from sfi_kernels.pages import read_pages
from sfi_kernels.partial_attention import PseudoToken
from sfi_kernels.step_descriptor import StepDescriptor
from sfi_kernels.top_k import top_k


def encode_keys(key_HTD: torch.Tensor, basis: CodeBasis) -> torch.Tensor:
    """Code the keys of one request, [H, T, D]: words of 16 channels, [H, W, T] int32."""
    check_basis(key_HTD, basis)
    return words_of(key_HTD, basis.mean_HD, by_word(basis.encode_HDC))


def code_tokens(
    key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes,
    query_BHGD: torch.Tensor | None = None, pseudo: PseudoToken | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """Code the new keys of every request that decodes, in place of `codes.word_BHWT`.

    They are in the pages, or among the descriptor's `new` rows, which are appended first. Queries of fast requests are
    kept, if they are given, and the logit of the mean key is added to their `pseudo` token of an early choice.
    """
    check_codes(key_PHND, block_table_BP, descriptor, codes)
    append_new(key_PHND, block_table_BP, descriptor, append.reference)
    for row, numbers in enumerate(descriptor.table_BX.tolist()):
        if numbers[step.MODE] >= step.FAST and (slot := numbers[step.SLOT]) >= 0:
            start, stop = numbers[step.LENGTH] - numbers[step.QUERIES], numbers[step.LENGTH]
            key_HTD = read_pages(key_PHND, block_table_BP[row], start, stop)[0]
            codes.word_BHWT[slot, :, :, start:stop] = words_of(key_HTD, codes.mean_BHD[slot], codes.encode_BHWDC[slot])
    if query_BHGD is not None:
        keep_queries(query_BHGD, descriptor, codes, pseudo, scale)


def keep_queries(
    query_BHGD: torch.Tensor, descriptor: StepDescriptor, codes: BatchCodes, pseudo: PseudoToken | None = None,
    scale: float = 1.0,
) -> None:  # fmt: skip
    """Keep the queries of fast requests for learning a basis again; for `pseudo` see `code_tokens`."""
    for row, numbers in enumerate(descriptor.table_BX.tolist()):
        if numbers[step.MODE] == step.FAST:
            slot = numbers[step.SLOT]
            codes.recent_BHXGD[slot, :, (numbers[step.LENGTH] - 1) % KEPT] = query_BHGD[row]
            if pseudo is not None:
                pseudo.logit_BHG[row] += (query_BHGD[row].float() * scale @ codes.mean_BHD[slot][:, :, None])[..., 0]


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
    diagnoses: bool = False,
    early: bool = False,
) -> Choice:
    """Choose the `budget` likeliest keys of J for every fast request, by their codes, as `choose_likeliest` does.

    Where J has no more keys, all are chosen. The new keys, in the pages or in the descriptor, are coded, too
    (`code_tokens`), the values that have left the recent window are added to the sums, and the queries are kept:
    `codes` are changed in place. For fast requests `position_BHS` is written, their sinks, the chosen positions, then
    -1, and `length_BH`, how many there are. Both and the codes have the rows that the descriptor's SLOT names; of -1
    nothing is kept. `rest` is the factor on the estimated probability of the unread keys, whose
    pseudo token has the mean value of J. `diagnoses` asks for diagnostics, of which Triton returns none:
    `unread_estimate`, the estimated attention on the keys of J that are not read, and `score_margin`, the score of the
    last key chosen over that of the best one that is not. `early` queries foretell those of the step, whose new keys
    are not there yet: `code_tokens` codes them later, keeps the true queries, and adds the logit of the mean key, which
    `pseudo` then lacks.
    """
    check(query_BHGD, key_PHND, value_PHNE, block_table_BP, descriptor, codes, position_BHS, length_BH)
    if not early:
        code_tokens(key_PHND, block_table_BP, descriptor, codes, query_BHGD)
    seen = codes._replace(mean_BHD=torch.zeros_like(codes.mean_BHD)) if early else codes
    B, H, G, _ = query_BHGD.shape
    index_BHK = position_BHS.new_full((B, H, budget), -1)
    logit_BHG = query_BHGD.new_full((B, H, G), -torch.inf, dtype=torch.float32)
    value_BHE = codes.sum_BHE.new_zeros(B, H, codes.sum_BHE.shape[2])
    diagnostics: dict[str, torch.Tensor] = {}
    if diagnoses:  # where everything is read
        unread_BH = torch.zeros(B, H, device=query_BHGD.device)
        diagnostics = {"unread_estimate": unread_BH, "score_margin": torch.full_like(unread_BH, torch.nan)}
    for row, numbers in enumerate(descriptor.table_BX.tolist()):
        if numbers[step.MODE] != step.FAST:
            continue
        first, stop, slot = (numbers[word] for word in (step.ALLOWED_START, step.ALLOWED_STOP, step.SLOT))
        count = stop - first
        value_BHE[row] = _mean_value(value_PHNE, block_table_BP[row], codes, slot, first, stop)
        chosen = torch.arange(max(count, 0), device=index_BHK.device, dtype=torch.int32).expand(H, -1)
        if count > budget:
            logits_HGT = scanned(query_BHGD[row], seen, slot, scale)[..., first:stop]
            chosen, logit_BHG[row] = choose_likeliest(logits_HGT, budget, rest=rest)
            for name, value_H in diagnosed(logits_HGT, chosen).items() if diagnoses else ():
                diagnostics[name][row] = value_H
        K = chosen.shape[1]
        index_BHK[row, :, :K] = chosen + first
        write_row(position_BHS, length_BH, slot, first, index_BHK[row, :, :K])
    return Choice(index_BHK, PseudoToken(logit_BHG, value_BHE), diagnostics)


def choose_likeliest(logits_HGT: torch.Tensor, budget: int, *, rest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the keys of one request that are likeliest, in the mean over the query heads of a KV head.

    Of the candidates, with logits in float32, not NaN, the `budget` with the highest scores are chosen, fewer than T;
    the lower position wins a tie. The 256 scores are a probability's exponent and 3 bits of the mantissa, from 2^-32 to
    1: keys of one score differ by an eighth, less than what their codes leave open, and a histogram finds the
    threshold. Return index_HK, int32, ascending, and the log of `rest` times the summed exponentials of the other keys'
    logits, unread_HG, float32; -inf if that is 0.
    """
    check_shapes("logits HGT", logits_HGT)
    if not 0 < budget < logits_HGT.shape[2]:
        raise ValueError(f"budget must be within 1 and {logits_HGT.shape[2] - 1}, got {budget}")
    H, G, _ = logits_HGT.shape
    log_sum_HG = logits_HGT.logsumexp(-1)
    weight_HGT = (logits_HGT - log_sum_HG[..., None]).exp()
    score_HT = ((weight_HGT.mean(1).float().view(torch.int32) >> DROPPED) - LOWEST).clamp_(0, 255).float()
    index_HK = top_k.reference(score_HT[None], budget)[0]
    read_HGK = weight_HGT.gather(2, index_HK.long()[:, None].expand(H, G, -1))
    unread_HG = (1 - read_HGK.sum(-1)).clamp_min(0) * rest
    return index_HK, log_sum_HG + unread_HG.log()


def diagnosed(logits_HGT: torch.Tensor, index_HK: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the diagnostics of one request's choice, [H] each; see `code_scan`."""
    score_HT = logits_HGT.float().softmax(-1).mean(1)
    unread_HT = score_HT.scatter(1, index_HK.long(), 0.0)
    margin_H = score_HT.gather(1, index_HK.long()).amin(1) / unread_HT.amax(1)
    return {"unread_estimate": unread_HT.sum(1), "score_margin": margin_H}


def words_of(key_HTD: torch.Tensor, mean_HD: torch.Tensor, encode_HWDC: torch.Tensor) -> torch.Tensor:
    """Code keys by a request's basis, by word: [H, W, T] int32."""
    centered_H1TD = (key_HTD.float() - mean_HD[:, None])[:, None]
    half_C, shift_C = _slots(key_HTD.device)
    level_HWTC = (centered_H1TD @ encode_HWDC).floor_().add_(half_C).clamp_min_(0).minimum(2 * half_C - 1)
    # the slots share no bit, so that their sum is their union
    return (level_HWTC.int() << shift_C).sum(-1, dtype=torch.int32)


def scanned(query_HGD: torch.Tensor, codes: BatchCodes, row: int, scale: float) -> torch.Tensor:
    """Estimate the logits of all keys of a row from their codes, [H, G, T] float32."""
    query_HGD = query_HGD.float() * scale
    half_C, shift_C = _slots(query_HGD.device)
    level_HWCT = (codes.word_BHWT[row][:, :, None] >> shift_C[:, None]) & (2 * half_C.int() - 1)[:, None]
    middle_HWCT = level_HWCT.float().add_((0.5 - half_C)[:, None])
    factor_HWGC = query_HGD[:, None] @ codes.query_BHWCD[row].mT
    logits_HGT = (factor_HWGC @ middle_HWCT).sum(1)
    return logits_HGT + query_HGD @ codes.mean_BHD[row][:, :, None]


@cache
def _slots(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # 2^(bits - 1) and the first bit of a word's slots
    half_C = torch.tensor([2.0 ** (bits - 1) for bits in BITS], device=device)
    return half_C, torch.tensor(SHIFTS, dtype=torch.int32, device=device)


def check_basis(key_HTD: torch.Tensor, basis: CodeBasis) -> None:
    """Raise `ValueError` unless keys fit the basis."""
    C = SLOTS * words(key_HTD.shape[-1])
    check_shapes("keys HTD, mean HD, encode HDC, query HDC", key_HTD, *basis, C=C)


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
    names = "key PHND, words SHWT, mean SHD, encode SHWDC, query_basis SHWCD, block_table Bp"
    check_shapes(names, key_PHND, codes.word_BHWT, *codes[:3], block_table_BP, B=descriptor.batch, C=SLOTS)
    numbers = {"words": codes.word_BHWT, "summed": codes.summed_BH, "block_table": block_table_BP}
    check_int32(key_PHND.device, **numbers)
    append_new(key_PHND, block_table_BP, descriptor, check_append)


def append_new(
    key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor, call: Callable[..., None]
) -> None:
    """Give the descriptor's `new` rows, if it has any, to `append`, or to what takes its arguments."""
    if (new := descriptor.new) is not None:
        which = descriptor.append_start_B, descriptor.append_count_B
        call(*new[:2], *which, key_PHND, new.value_PHNE, new.norm_PHN, block_table_BP)


def check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor,
    descriptor: StepDescriptor, codes: BatchCodes, position: torch.Tensor, length: torch.Tensor,
) -> None:  # fmt: skip
    """Raise the errors of `code_scan`."""
    check_codes(key, table, descriptor, codes)
    names, sums = "key PHND, query BHGD, value PHNE, sum RHE, summed RH, position RHS, length RH", codes[4:6]
    check_shapes(names, key, query, value, *sums, position, length, B=descriptor.batch)
    check_pages(query, "query", key=key, value=value)
    check_int32(query.device, position=position, length=length)
